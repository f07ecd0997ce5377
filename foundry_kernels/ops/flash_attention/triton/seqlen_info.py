"""The start and length of a sequence: a row of a dense batch, or a part of packed tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def seqlen_info(
    n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN: tl.constexpr,
    leftpad_k_ptr=None, PAGE_SIZE: tl.constexpr = False,
):  # fmt: skip
    """(start_q, seqlen_q, start_k, seqlen_k) of sequence n.

    For keys in pages, cu_seqlens_k_ptr has one past the last position of each sequence, and start_k is its first
    position. `tokens_q` and `tokens_k` are the tokens of a dense sequence, or of all packed ones. cu_seqlens are
    clamped to them, so that nothing outside of the tensors is read or written.
    """
    if VARLEN:
        start_q, seqlen_q = _packed(cu_seqlens_q_ptr + n, tokens_q)
        if PAGE_SIZE:
            start_k, seqlen_k = _positions(cu_seqlens_k_ptr + n, leftpad_k_ptr, n, tokens_k)
        else:
            start_k, seqlen_k = _packed(cu_seqlens_k_ptr + n, tokens_k)
    else:
        start_q, seqlen_q = 0, tokens_q
        start_k, seqlen_k = 0, tokens_k
    return start_q, seqlen_q, start_k, seqlen_k


@triton.jit
def _positions(seqused_k_ptr, leftpad_k_ptr, n, most):
    stop = tl.minimum(tl.maximum(tl.load(seqused_k_ptr), 0), most).to(tl.int32)
    start = tl.zeros([], tl.int32)
    if leftpad_k_ptr is not None:
        start = tl.minimum(tl.maximum(tl.load(leftpad_k_ptr + n), 0), stop).to(tl.int32)
    return start, stop - start


@triton.jit
def _packed(cu_seqlens_ptr, total):
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr), 0), total).to(tl.int32)
    stop = tl.minimum(tl.maximum(tl.load(cu_seqlens_ptr + 1), 0), total).to(tl.int32)
    return start, tl.maximum(stop - start, 0)
