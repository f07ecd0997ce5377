"""Checks the arguments of flash-attn's functions with a key-value cache; nothing is written."""

from __future__ import annotations

from typing import SupportsIndex

import torch
from torch import Tensor

from foundry_kernels.compat.scalars import as_int
from foundry_kernels.core.checks import check_device, check_dtype, check_float, check_integer, check_rank, check_shape
from foundry_kernels.ops.flash_attention.checks import MAX_HEAD_DIM

NO_GRADIENT = "a cache is for inference: no gradient flows through it; use torch.no_grad() or detach inputs"
ROTARY = "rotary_cos and rotary_sin must be given together, and with new keys k to be rotated"


def check_tensors(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None, v: Tensor | None, by_index: bool
) -> int:
    """Checks all but the lengths; returns T_new."""
    check_float("q", q)
    check_rank("q", q, 4, "[B, T, H, D]")
    if (k is None) != (v is None):
        raise ValueError("k and v must be given together; got one of them")
    named: list[tuple[str, Tensor, str]] = [
        ("k_cache", k_cache, "[B, S, Hk, D]"),
        ("v_cache", v_cache, "[B, S, Hk, Dv]"),
    ]
    if k is not None and v is not None:
        named += [("k", k, "[B, T_new, Hk, D]"), ("v", v, "[B, T_new, Hk, Dv]")]
    for name, x, layout in named:
        check_float(name, x)
        check_rank(name, x, 4, layout)
        check_dtype(name, x, "q", q)
        check_device(name, x, "q", q)

    batch, _, n_heads, head_dim = q.shape
    rows, size, n_kv_heads, _ = k_cache.shape
    if not by_index and rows != batch:
        raise ValueError(
            f"k_cache must have q's batch size {batch} without cache_batch_idx; got {tuple(k_cache.shape)}"
        )
    if n_kv_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(f"q must have a multiple of k_cache's {n_kv_heads} heads; got {n_heads}")
    check_shape("k_cache", k_cache, (rows, size, n_kv_heads, head_dim), "q's head dimension")
    check_shape("v_cache", v_cache, (rows, size, n_kv_heads, v_cache.shape[3]), "that of k_cache except for the last")
    for name, n in (("q", head_dim), ("v_cache", v_cache.shape[3])):
        if not 1 <= n <= MAX_HEAD_DIM:
            raise ValueError(f"{name} must have a head dimension of 1 to {MAX_HEAD_DIM}; got {n}")
    if k is None or v is None:
        return 0
    new = k.shape[1]
    check_shape("k", k, (batch, new, n_kv_heads, head_dim), "q's batch and k_cache's heads")
    check_shape("v", v, (batch, new, n_kv_heads, v_cache.shape[3]), "k's tokens and v_cache's heads")
    if not (torch.compiler.is_compiling() or q.is_meta):
        _check_memory({"k_cache": k_cache, "v_cache": v_cache}, {"q": q, "k": k, "v": v})
    return new


def _check_memory(written: dict[str, Tensor], read: dict[str, Tensor]) -> None:
    """Checks that no element of a cache is written twice or is also read as an input."""
    for name, cache in written.items():
        if any(n > 1 and s == 0 for n, s in zip(cache.shape, cache.stride(), strict=True)):
            raise ValueError(f"{name} must have a place of its own for each element; got strides {cache.stride()}")
        for other, x in read.items():
            begin, end = _bytes(x)
            cache_begin, cache_end = _bytes(cache)
            if begin < cache_end and cache_begin < end:
                raise ValueError(f"{other} must not share memory with {name}, which is written to")
    k_cache, v_cache = written.values()
    check_apart(k_cache, v_cache)


def _bytes(x: Tensor) -> tuple[int, int]:
    """Returns the addresses from x's first element to the end of its last one."""
    if x.numel() == 0:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def read_where(
    batch: int,
    new: int,
    size: int | None,
    cache_seqlens: SupportsIndex | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
) -> tuple[list[int], list[int] | None, list[int]]:
    """Lengths, rows and paddings; without lengths a cache of rows of `size` positions is full."""
    if cache_seqlens is None:
        if new:
            raise ValueError("cache_seqlens must be given with k and v: it says where they go")
        if size is None:
            raise ValueError("cache_seqlens must be given with block_table: pages do not say how many keys there are")
        cache_seqlens = size
    if isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0:
        lengths = _read("cache_seqlens", cache_seqlens, batch)
    else:
        lengths = [as_int("cache_seqlens", cache_seqlens)] * batch
    chosen = None if cache_batch_idx is None else _read("cache_batch_idx", cache_batch_idx, batch)
    return lengths, chosen, [0] * batch if cache_leftpad is None else _read("cache_leftpad", cache_leftpad, batch)


def _read(name: str, x: Tensor, batch: int) -> list[int]:
    check_integer(name, x)
    check_shape(name, x, (batch,), "one for each sequence")
    return x.tolist()


def check_tables(cos: Tensor, sin: Tensor, after: int) -> None:
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_float(name, table)
        check_rank(name, table, 2, "[P, R/2]")
    check_shape("rotary_sin", sin, cos.shape, "that of rotary_cos")
    if after > cos.shape[0]:
        raise ValueError(f"rotary_cos must have a row for each of {after} positions; got shape {tuple(cos.shape)}")


def check_apart(k_cache: Tensor, v_cache: Tensor) -> None:
    """Checks that the two caches do not overlap, because both are written.

    Raises:
        ValueError: they overlap, or may overlap.
    """
    if k_cache.numel() == 0 or v_cache.numel() == 0 or k_cache.dtype != v_cache.dtype:
        return
    far = (v_cache.data_ptr() - k_cache.data_ptr()) // k_cache.element_size()
    after_k, after_v = (sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in (k_cache, v_cache))
    if far > after_k or -far > after_v:
        return
    dims = sorted(zip(k_cache.stride(), k_cache.shape, v_cache.shape, strict=True), reverse=True)
    if k_cache.stride() != v_cache.stride() or _meet(far, dims):
        raise ValueError("v_cache must not share memory with k_cache: both are written to")


def _meet(far: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether sum of ``d * stride`` is `far` for differences d of two indices, of which the first is below the first
    size and the other below the second."""
    if not dims:
        return far == 0
    (stride, n, m), rest = dims[0], dims[1:]
    most, least = (sum(s * (each[i] - 1) for each in rest for s in each[:1]) for i in (1, 2))
    first, last = -((most - far) // stride) if stride else 0, (far + least) // stride if stride else 0
    return any(_meet(far - d * stride, rest) for d in range(max(first, 1 - m), min(last, n - 1) + 1))
