"""The outputs, for all chunks at once: from the state at a chunk's start, and from the chunk's own updates."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels.ops.gated_delta_rule.triton.chunks import (
    between,
    from_start,
    load_decay,
    load_tile,
    load_tokens,
    place_of,
    store_tile,
)
from foundry_kernels.ops.gated_delta_rule.triton.products import product


@triton.jit(do_not_specialize=["tokens", "n_chunks", "n_documents"])
def gated_delta_rule_outputs_kernel(
    q_ptr, k_ptr, decay_ptr, q_norm_ptr, k_norm_ptr, states_ptr, updates_ptr, cu_seqlens_ptr, out_ptr,
    n_documents, tokens, n_chunks, n_heads, group, decay_size, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_ob, stride_oh, stride_ot,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program computes a chunk's outputs of one head, in a block of columns."""
    scale = tl.full([], 0.0, COMPUTE) + scale
    n_blocks = tl.cdiv(DV, BLOCK_V)
    v0 = tl.program_id(0) % n_blocks * BLOCK_V
    head = (tl.program_id(0) // n_blocks % n_heads).to(tl.int64)
    i = tl.program_id(0) // n_blocks // n_heads
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    n_rows = place.n_rows
    batch, first, kv_head = place.batch, place.first, head // group
    n_cols = DV - v0
    WHOLE: tl.constexpr = DV % BLOCK_V == 0
    p_q = q_ptr + batch * stride_qb + kv_head * stride_qh + first * stride_qt
    p_k = k_ptr + batch * stride_kb + kv_head * stride_kh + first * stride_kt
    p_state = states_ptr + ((batch * n_heads + head) * n_chunks + place.chunk) * (D * DV) + v0
    o_tokens = (batch * n_heads + head) * tokens + first
    o_norms = (batch * (n_heads // group) + kv_head) * tokens
    p_q_norm = None if q_norm_ptr is None else q_norm_ptr + o_norms
    p_k_norm = None if k_norm_ptr is None else k_norm_ptr + o_norms
    b_out = tl.zeros([CHUNK, BLOCK_V], COMPUTE)
    b_qk = tl.zeros([CHUNK, CHUNK], COMPUTE)
    for d in range(0, D, BLOCK_D):
        b_q = load_tile(p_q + d, stride_qt, n_rows, D - d, CHUNK, BLOCK_D, D % BLOCK_D == 0)
        b_k = load_tile(p_k + d, stride_kt, n_rows, D - d, CHUNK, BLOCK_D, D % BLOCK_D == 0)
        b_state = load_tile(p_state + tl.cast(d, tl.int64) * DV, DV, D - d, n_cols, BLOCK_D, BLOCK_V, WHOLE)
        b_out = product(b_q, b_state, b_out, KIND, 2)
        b_qk = product(b_q, tl.trans(b_k), b_qk, KIND, 2)
    decay = load_decay(decay_ptr, o_tokens, decay_size, n_rows, COMPUTE, CHUNK)
    b_k_norm = load_tokens(p_k_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0)
    b_q_norm = load_tokens(p_q_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0)
    b_p = b_qk * b_k_norm[None, :] * between(decay, False, CHUNK)
    b_u = load_tile(updates_ptr + o_tokens * DV + v0, DV, n_rows, n_cols, CHUNK, BLOCK_V, WHOLE)
    b_out = product(b_p, b_u, b_out * from_start(decay)[:, None], KIND, 2)
    b_out = round_to(b_out * (b_q_norm * scale)[:, None], out_ptr.dtype.element_ty)
    p_out = out_ptr + batch * stride_ob + head * stride_oh + first * stride_ot + v0
    store_tile(p_out, stride_ot, b_out, n_rows, n_cols, CHUNK, BLOCK_V, WHOLE)
