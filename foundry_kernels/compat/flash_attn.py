"""flash-attn's functions for training: dense and packed sequences, tokens before heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsFloat, SupportsIndex

from torch import Tensor

from foundry_kernels.compat.attn_probs import dense_probs, packed_probs, with_seed
from foundry_kernels.compat.scalars import as_bool, as_float, as_int, as_window
from foundry_kernels.core.checks import check_positive, check_rank, check_tensor
from foundry_kernels.ops.flash_attention import Options, flash_attention, flash_attention_varlen

# Each function has flash-attn's signature in full, here and in packed.py: callers, editors and `inspect` read it.


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: SupportsFloat = 0.0,
    softmax_scale: SupportsFloat | None = None,
    causal: bool = False,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    softcap: SupportsFloat = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """:func:`foundry_kernels.flash_attention` in flash-attn's layout.

    Args:
        q: ``[B, T, H, D]``, any strides, dtypes as for :func:`foundry_kernels.flash_attention`.
        k: ``[B, S, Hk, D]``; H must be a multiple of Hk.
        v: ``[B, S, Hk, Dv]``.
        dropout_p: in [0, 1): the probability that a weight is dropped. The seed comes from torch's default
            generator of q's device; it drops other weights than flash-attn.
        softmax_scale: factor on the scores; ``1 / sqrt(D)`` if None.
        causal: the last query sees the last key, and none sees a later one.
        window_size: ``(left, right)``, a tuple, list or tensor; -1 is unbounded.
        softcap: bounds the scores; 0 does not.
        alibi_slopes: ``[H]`` or ``[B, H]`` float32.
        deterministic: as for :func:`foundry_kernels.flash_attention`, whose default is True.
        return_attn_probs: also return the lse and, with dropout, flash-attn's ``S_dmask``. The kernels do not compute
            that matrix. Plain PyTorch computes it from the lse: B * H * T * S elements of q's dtype, with several
            float32 temporaries of that size. Without dropout it is None, and nothing is computed.
        backend: "auto", "reference", "triton" or "native".

    A number may also be NumPy's, or a tensor of one element: reading one that is on a GPU waits for it.

    Returns:
        ``out [B, T, H, Dv]``, or ``(out, softmax_lse [B, H, T] float32, S_dmask)``. A query that sees no key has output
        0 and lse -inf (where flash-attn has +inf). ``S_dmask [B, H, T, S]`` of q's dtype, or None without dropout, is
        the softmax, negative where a weight was dropped, without division by the probability of being kept; it
        takes no gradient.

    Raises:
        TypeError, ValueError: an argument does not fit; see :func:`foundry_kernels.flash_attention`.
        BackendUnavailable: the named backend does not support this device or dtype.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        check_rank(name, x, 4, "[B, tokens, heads, head_dim]")
    options = translate(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, backend, deterministic)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if not return_attn_probs:
        return flash_attention(q, k, v, **options).transpose(1, 2)
    options = with_seed(q, options)
    out, lse = flash_attention(q, k, v, return_lse=True, **options)
    return out.transpose(1, 2), lse, dense_probs(q, k, lse, options)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: SupportsIndex,
    max_seqlen_k: SupportsIndex,
    dropout_p: SupportsFloat = 0.0,
    softmax_scale: SupportsFloat | None = None,
    causal: bool = False,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    softcap: SupportsFloat = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """:func:`foundry_kernels.flash_attention_varlen` by flash-attn's signature.

    Args:
        q: ``[total_q, H, D]``.
        k: ``[total_k, Hk, D]``.
        v: ``[total_k, Hk, Dv]``.
        cu_seqlens_q, cu_seqlens_k: ``[B + 1]`` int32 (or int64): where each sequence begins, and the total.
        max_seqlen_q, max_seqlen_k: at least the length of the longest sequence.
        block_table: ``[B, max_blocks]`` int32 (or int64): k is ``[num_blocks, page_block_size, Hk, D]`` and v likewise,
            see :func:`foundry_kernels.flash_attention_varlen`. Without a backward pass and dropout.
        others: as for :func:`flash_attn_func`.

    Returns:
        ``out [total_q, H, Dv]``, or ``(out, softmax_lse [H, total_q] float32, S_dmask)``: with dropout
        ``[B, H, max_seqlen_q, max_seqlen_k]``, 0 outside of each sequence, for which the lengths are read; else None.

    Raises:
        As :func:`flash_attn_func`.
    """
    options = translate(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, backend, deterministic)
    max_seqlens = (as_int("max_seqlen_q", max_seqlen_q), as_int("max_seqlen_k", max_seqlen_k))
    packed = (q, k, v, cu_seqlens_q, cu_seqlens_k, *max_seqlens)
    if not return_attn_probs:
        return flash_attention_varlen(*packed, block_table=block_table, **options)
    options = with_seed(q, options)
    out, lse = flash_attention_varlen(*packed, block_table=block_table, return_lse=True, **options)
    if block_table is not None:
        return out, lse, None
    return out, lse, packed_probs(q, k, lse, (cu_seqlens_q, cu_seqlens_k), max_seqlens, options)


def translate(
    dropout_p: SupportsFloat,
    softmax_scale: SupportsFloat | None,
    causal: bool,
    window_size: Iterable[SupportsIndex],
    softcap: SupportsFloat,
    alibi_slopes: Tensor | None,
    backend: str,
    deterministic: bool = True,
) -> Options:
    """Converts flash-attn's options to those of :func:`foundry_kernels.flash_attention`; errors use flash-attn's
    names."""
    scale = None if softmax_scale is None else as_float("softmax_scale", softmax_scale)
    if scale is not None:
        check_positive("softmax_scale", scale)
    cap = as_float("softcap", softcap) or None
    if cap is not None:
        check_positive("softcap", cap)
    left, right = as_window(window_size)
    return {
        "causal": as_bool("causal", causal),
        "scale": scale,
        "window": None if left is None and right is None else (left, right),
        "softcap": cap,
        "alibi_slopes": alibi_slopes,
        "dropout_p": as_float("dropout_p", dropout_p),
        "deterministic": as_bool("deterministic", deterministic),
        "backend": backend,
    }
