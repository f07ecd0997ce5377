"""FlashAttention 3's functions, with the signatures of its `flash_attn_interface`: tokens before heads, no dropout.

``from foundry_kernels.compat.flash_attn_3 import flash_attn_func`` replaces ``from flash_attn_interface import
flash_attn_func``. Besides FlashAttention 2's arguments there are

* `qv`: a second set of queries, whose dot products with the values are added to the scores (multi-head latent
  attention);
* `attention_chunk`: a query sees only keys of its own chunk of so many positions, the last query being where the last
  key is (Llama 4's chunked attention);
* `seqused_q` and `seqused_k`: how many tokens of each packed sequence are in use.

`num_splits`, `pack_gqa`, `sm_margin` and `scheduler_metadata` control how FlashAttention 3 launches its kernels: they
are accepted and ignored. The arguments for 8-bit inputs (`q_descale`, `k_descale`, `v_descale`) must be None. All
gradients are supported, also those that FlashAttention 3 lacks (`qv`, `attention_chunk`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, SupportsFloat, SupportsIndex

from torch import Tensor

from foundry_kernels.compat.combine import flash_attn_combine
from foundry_kernels.compat.flash_attn import translate
from foundry_kernels.compat.kvcache import append_and_attend, check_num_splits
from foundry_kernels.compat.paged_cache import append_and_attend_pages
from foundry_kernels.compat.qv import attend, attend_packed, check_qv
from foundry_kernels.compat.scalars import as_int
from foundry_kernels.compat.segments import segments
from foundry_kernels.core.checks import check_rank, check_tensor
from foundry_kernels.ops.flash_attention import Options
from foundry_kernels.ops.flash_attention.checks import check_dense, check_varlen

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: SupportsFloat | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    attention_chunk: SupportsIndex = 0,
    softcap: SupportsFloat = 0.0,
    num_splits: SupportsIndex = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: SupportsIndex = 0,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`foundry_kernels.flash_attention` in FlashAttention 3's layout.

    Args:
        q: ``[B, T, H, D]``, any strides, dtypes as for :func:`foundry_kernels.flash_attention`.
        k: ``[B, S, Hk, D]``; H must be a multiple of Hk.
        v: ``[B, S, Hk, Dv]``.
        softmax_scale: factor on the scores; ``1 / sqrt(D)`` if None, and ``1 / sqrt(D + Dv)`` with `qv`.
        qv: ``[B, T, H, Dv]`` or None: its dot products with the values are added to those of q and k, before scale and
            cap. If D + Dv <= 512, keys and values are copied side by side, except for few queries (16 or fewer, without
            a soft cap); for these, and for wider heads, the smaller matmul becomes a bias of ``B * H * T * S`` in
            float32.
        attention_chunk: the size of chunks, or 0 for none: one call of the kernel for each.
        causal, window_size, softcap, deterministic: as for :func:`foundry_kernels.compat.flash_attn_func`.
        return_attn_probs: return the lse too (FlashAttention 3 returns no probabilities).
        backend: "auto", "reference", "triton" or "native".
        others: see above.

    Returns:
        ``out [B, T, H, Dv]``, or ``(out, softmax_lse [B, H, T] float32)``. A query that sees no key has output 0 and
        lse -inf.

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.
    """
    _check_unused(num_splits, sm_margin, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    chunk = _chunk(attention_chunk)
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        check_rank(name, x, 4, "[B, tokens, heads, head_dim]")
    options = translate(0.0, softmax_scale, causal, window_size, softcap, None, backend, deterministic)
    options = check_qv(qv, q, k, v, options)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if qv is not None:
        check_dense(q, k, v)
        qv = qv.transpose(1, 2)
    out, lse = attend(q, k, v, qv, chunk, options)
    out = out.transpose(1, 2)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: SupportsFloat | None = None,
    causal: bool = False,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    attention_chunk: SupportsIndex = 0,
    softcap: SupportsFloat = 0.0,
    deterministic: bool = False,
    num_heads_q: SupportsIndex | None = None,
    sm_margin: SupportsIndex = 0,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`flash_attn_func` of one tensor that holds q, k and v; they are views of it.

    Args:
        qkv: ``[B, T, 3, H, D]``, or ``[B, T, H + 2 Hk, D]`` with `num_heads_q`: heads of queries, keys, then values.
        num_heads_q: H, for a `qkv` of four dimensions.
        others: as for :func:`flash_attn_func`, and so are the results and errors.
    """
    check_tensor("qkv", qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    else:
        check_rank("qkv", qkv, 4, "[B, T, 3, H, D], or [B, T, H + 2 Hk, D] with num_heads_q")
        if num_heads_q is None:
            raise ValueError("num_heads_q must be given for qkv of [B, T, H + 2 Hk, D]; got None")
        n_q = as_int("num_heads_q", num_heads_q)
        n_k = (qkv.shape[2] - n_q) // 2
        if n_q < 1 or n_k < 1 or n_q + 2 * n_k != qkv.shape[2]:
            raise ValueError(f"num_heads_q must leave an even number of qkv's {qkv.shape[2]} heads; got {n_q}")
        q, k, v = qkv.split((n_q, n_k, n_k), 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        deterministic=deterministic, sm_margin=sm_margin, return_attn_probs=return_attn_probs, backend=backend,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: SupportsIndex,
    max_seqlen_k: SupportsIndex,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: SupportsFloat | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    attention_chunk: SupportsIndex = 0,
    softcap: SupportsFloat = 0.0,
    num_splits: SupportsIndex = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: SupportsIndex = 0,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`foundry_kernels.flash_attention_varlen` by FlashAttention 3's signature.

    Args:
        q: ``[total_q, H, D]``.
        k: ``[total_k, Hk, D]``.
        v: ``[total_k, Hk, Dv]``.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]`` int32 (or int64): where each sequence begins, and the total.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
        seqused_q: ``[B]`` int32 or int64: only this number of each sequence's first queries is used. The others have
            output 0 and lse -inf, where FlashAttention 3 leaves uninitialized memory.
        seqused_k: likewise for keys and values: unused ones are not attended to, and the last used query is aligned
            with the last used key. Nothing is copied and no length is read.
        qv: ``[total_q, H, Dv]`` or None, as for :func:`flash_attn_func`. Where D + Dv > 512, the lengths are read and
            each sequence takes a call of its own.
        attention_chunk: the size of chunks, or 0: each chunk is a packed sequence to the kernel.
        others: as for :func:`flash_attn_func`.

    Returns:
        ``out [total_q, H, Dv]``, or ``(out, softmax_lse [H, total_q] float32)``.

    Raises:
        ValueError: and all others as :func:`flash_attn_func`. The values of cumulative and used lengths are checked
            where reading them does not wait for a GPU.
    """
    _check_unused(num_splits, sm_margin, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    chunk = _chunk(attention_chunk)
    longest = (as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k))
    options = translate(0.0, softmax_scale, causal, window_size, softcap, None, backend, deterministic)
    out, lse = attend_segments(
        (q, k, v, cu_seqlens_q, cu_seqlens_k, *longest), seqused_q, seqused_k, qv, chunk, options
    )
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: SupportsIndex | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: SupportsIndex | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: SupportsFloat | None = None,
    causal: bool = False,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    attention_chunk: SupportsIndex = 0,
    softcap: SupportsFloat = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: SupportsIndex = 0,
    pack_gqa: bool | None = None,
    sm_margin: SupportsIndex = 0,
    return_softmax_lse: bool = False,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`foundry_kernels.compat.flash_attn_with_kvcache` by FlashAttention 3's signature.

    Args:
        qv: ``[B, T, H, Dv]`` or None, as for :func:`flash_attn_func`. With up to 16 queries and no soft cap the kernel
            reads the cache in place for the wider of the two matmuls, and the narrower one is a bias.
        attention_chunk: the size of chunks, counted from the first key that `cache_leftpad` leaves, or 0.
        page_table: `block_table` of :func:`foundry_kernels.compat.flash_attn_with_kvcache`.
        cu_seqlens_q: ``[B + 1]`` int32 or int64: q is packed, ``[total_q, H, D]``, and so are new keys and values, with
            `cu_seqlens_k_new` ``[B + 1]``, and the results, ``[total_q, H, Dv]`` and ``[H, total_q]``. The call waits
            for both where they are on a GPU. `qv` and `attention_chunk` do not support these arguments or `page_table`.
        rotary_seqlens: must be None: new tokens are rotated by `cache_seqlens`.
        max_seqlen_q: accepted.
        others: as for :func:`foundry_kernels.compat.flash_attn_with_kvcache`.

    Returns:
        ``out [B, T, H, Dv]`` or ``(out, softmax_lse [B, H, T])``, without FlashAttention 3's partial results.

    Raises:
        As :func:`foundry_kernels.compat.flash_attn_with_kvcache`; nothing is written then.
    """
    _check_unused(
        num_splits, sm_margin, rotary_seqlens=rotary_seqlens, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale,
    )  # fmt: skip
    chunk = _chunk(attention_chunk)
    options = translate(0.0, softmax_scale, causal, window_size, softcap, None, backend)
    caches, rotary = (k_cache, v_cache, k, v), (rotary_cos, rotary_sin, rotary_interleaved)
    where = (cache_seqlens, cache_batch_idx, cache_leftpad)
    if cu_seqlens_k_new is not None and cu_seqlens_q is None:
        raise ValueError("cu_seqlens_k_new needs cu_seqlens_q: queries and new keys are packed together")
    if page_table is None and cu_seqlens_q is None:
        out, lse = append_and_attend(q, caches, rotary, where, options, qv, chunk)
        return (out, lse) if return_softmax_lse else out
    for name, value in (("qv", qv), ("attention_chunk", chunk or None)):
        if value is not None:
            raise ValueError(f"{name} does not support page_table or cu_seqlens_q; got both")
    packed = (cu_seqlens_q, cu_seqlens_k_new)
    out, lse = append_and_attend_pages(q, caches, rotary, where, page_table, options, packed, "page_table")
    return (out, lse) if return_softmax_lse else out


def attend_segments(
    packed: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int],
    seqused_q: Tensor | None,
    seqused_k: Tensor | None,
    qv: Tensor | None,
    attention_chunk: int,
    options: Options,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of packed sequences, of which parts are in use."""
    check_varlen(*packed)
    q, k, v, cu_seqlens_q, cu_seqlens_k, *longest = packed
    options = check_qv(qv, q, k, v, options)
    cu_q, cu_k = segments(cu_seqlens_q, cu_seqlens_k, longest[1], seqused_q, seqused_k, attention_chunk)
    return attend_packed((q, k, v, cu_q, cu_k, longest[0], longest[1]), qv, options)


def _chunk(attention_chunk: SupportsIndex) -> int:
    size = as_int("attention_chunk", attention_chunk)
    if size < 0:
        raise ValueError(f"attention_chunk must be >= 0; got {size}")
    return size


_WHY_NOT = {
    "rotary_seqlens": "new tokens are rotated by cache_seqlens; rotate with apply_rotary_emb for other positions",
}


def _check_unused(num_splits: SupportsIndex, sm_margin: SupportsIndex, **absent: object) -> None:
    check_num_splits(num_splits)
    as_int("sm_margin", sm_margin)
    for name, value in absent.items():
        if value is not None:
            why = _WHY_NOT.get(name, "8-bit inputs are not supported; pass bfloat16 or float16")
            raise ValueError(f"{name} must be None: {why}")
