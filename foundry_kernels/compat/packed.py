"""flash-attn's functions for queries, keys and values in one tensor. They use views and copy nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import SupportsFloat, SupportsIndex

from torch import Tensor

from foundry_kernels.compat.flash_attn import flash_attn_func, flash_attn_varlen_func
from foundry_kernels.core.checks import check_rank, check_tensor

# The signatures are flash-attn's, each in full, as in flash_attn.py.


def flash_attn_qkvpacked_func(
    qkv: Tensor,
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
    """:func:`foundry_kernels.compat.flash_attn_func` of one tensor that holds q, k and v.

    Args:
        qkv: ``[B, T, 3, H, D]``, any strides.
        others: as for :func:`foundry_kernels.compat.flash_attn_func`.

    Returns:
        ``out [B, T, H, D]``, or ``(out, softmax_lse [B, H, T] float32, S_dmask)``. The gradient of `qkv` has its shape.

    Raises:
        As :func:`foundry_kernels.compat.flash_attn_func`.
    """
    q, k, v = _unbind("qkv", qkv, 3, 2, "[B, T, 3, H, D]")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, backend=backend)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
    """:func:`foundry_kernels.compat.flash_attn_func` with keys and values in one tensor.

    Args:
        q: ``[B, T, H, D]``, any strides.
        kv: ``[B, S, 2, Hk, D]``, any strides; H must be a multiple of Hk.
        others: as for :func:`foundry_kernels.compat.flash_attn_func`.

    Returns:
        ``out [B, T, H, D]``, or ``(out, softmax_lse [B, H, T] float32, S_dmask)``.

    Raises:
        As :func:`foundry_kernels.compat.flash_attn_func`.
    """
    k, v = _unbind("kv", kv, 2, 2, "[B, S, 2, Hk, D]")
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_func(q, k, v, *options, backend=backend)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: SupportsIndex,
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
    """:func:`foundry_kernels.compat.flash_attn_varlen_func` of one tensor that holds q, k and v.

    Args:
        qkv: ``[total, 3, H, D]``, any strides.
        cu_seqlens: ``[B + 1]`` int32 (or int64): where each sequence begins, and the total.
        max_seqlen: at least the length of the longest sequence.
        others: as for :func:`foundry_kernels.compat.flash_attn_func`.

    Returns:
        ``out [total, H, D]``, or ``(out, softmax_lse [H, total] float32, S_dmask)``.

    Raises:
        As :func:`foundry_kernels.compat.flash_attn_func`.
    """
    q, k, v = _unbind("qkv", qkv, 3, 1, "[total, 3, H, D]")
    packed = (q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(*(packed + options), backend=backend)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
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
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """:func:`foundry_kernels.compat.flash_attn_varlen_func` with keys and values in one tensor.

    Args:
        q: ``[total_q, H, D]``, any strides.
        kv: ``[total_k, 2, Hk, D]``, any strides; H must be a multiple of Hk.
        others: as for :func:`foundry_kernels.compat.flash_attn_varlen_func`.

    Returns:
        ``out [total_q, H, D]``, or ``(out, softmax_lse [H, total_q] float32, S_dmask)``.

    Raises:
        As :func:`foundry_kernels.compat.flash_attn_func`.
    """
    k, v = _unbind("kv", kv, 2, 1, "[total_k, 2, Hk, D]")
    packed = (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return flash_attn_varlen_func(*(packed + options), backend=backend)


def _unbind(name: str, x: Tensor, count: int, dim: int, layout: str) -> tuple[Tensor, ...]:
    check_tensor(name, x)
    check_rank(name, x, dim + 3, layout)
    if x.shape[dim] != count:
        raise ValueError(f"{name} must be {layout}; got shape {tuple(x.shape)}")
    return x.unbind(dim)
