"""flash-attn's function for generation: appends to a key-value cache in place, then attends to it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple, SupportsFloat, SupportsIndex

import torch
from torch import Tensor

from foundry_kernels.compat.cache_checks import NO_GRADIENT, ROTARY, check_tables, check_tensors, read_where
from foundry_kernels.compat.flash_attn import translate
from foundry_kernels.compat.paged_cache import Places, append_and_attend_pages, attend_places
from foundry_kernels.compat.qv import attend, check_qv
from foundry_kernels.compat.scalars import as_int
from foundry_kernels.core.inference import cut, without_backward
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, Options
from foundry_kernels.ops.flash_attention.checks import Scores, check_alibi_slopes
from foundry_kernels.ops.rope import ROPE, rope


class _Cached(NamedTuple):
    """One sequence's part of the cache: row `row`, positions begin .. length - 1; new keys go to `length` and on."""

    row: int
    begin: int
    length: int


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: SupportsIndex | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: SupportsFloat | None = None,
    causal: bool = False,
    window_size: Iterable[SupportsIndex] = (-1, -1),
    softcap: SupportsFloat = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: SupportsIndex = 0,
    return_softmax_lse: bool = False,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention over a key-value cache, after new keys and values are appended to it.

    Sequence n has the cached keys ``k_cache[n, : cache_seqlens[n]]``. If `k` and `v` are given, they are appended to
    those, in place; the queries then attend to all of them. If an argument does not fit, nothing is written.

    Args:
        q: ``[B, T, H, D]`` float32, bfloat16, float16 or float64, any strides, D and Dv <= 512.
        k_cache: ``[B, S, Hk, D]`` of q's dtype, any strides; ``[rows, S, Hk, D]`` with `cache_batch_idx`. It is read in
            place and never copied.
        v_cache: ``[B, S, Hk, Dv]``, likewise.
        k: ``[B, T_new, Hk, D]`` of q's dtype, or None; shares no memory with a cache. T_new need not be T.
        v: ``[B, T_new, Hk, Dv]``, given exactly if `k` is.
        rotary_cos: ``[P, R/2]``, R <= D, or None. Rotates the new keys by their positions ``cache_seqlens[n] + i``
            before they are stored, and the queries: by ``cache_seqlens[n] + i`` if there is a causal mask or a window,
            otherwise all by ``cache_seqlens[n]``. Needs `k`, and a row for each position.
        rotary_sin: of its shape and dtype.
        cache_seqlens: ``[B]`` int32 or int64, or one int for all: how many keys are cached. None means S, and is an
            error where there are new ones.
        cache_batch_idx: ``[B]`` int32 or int64: each sequence's row of the cache; None means 0 .. B - 1. Where there
            are new keys, no row may occur twice.
        cache_leftpad: ``[B]`` int32 or int64: keys before this position are not attended to; None means 0. Positions
            are counted from the beginning of the cache in any case.
        block_table: ``[B, max_blocks]`` int32 or int64, on any device that k_cache or the host is: the caches are pages
            ``[num_blocks, page_block_size, Hk, D]``, of any size >= 1, with last strides of 1; position p of sequence n
            is row ``p % page_block_size`` of page ``block_table[n, p // page_block_size]``. Sequences may share pages,
            but a sequence may not append to a page in which another sequence has keys. With `cache_batch_idx`, ``[rows,
            max_blocks]``, of which each sequence chooses a row.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as for
            :func:`foundry_kernels.compat.flash_attn_func`; the last query is aligned with the last key.
        rotary_interleaved: True rotates the pairs ``(2i, 2i + 1)``, False ``(i, i + R/2)``.
        num_splits: accepted and ignored; each backend chooses how to split the work.
        return_softmax_lse: also return the log-sum-exp of each row.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``out [B, T, H, Dv]`` or ``(out, softmax_lse [B, H, T])``. A query that sees no key has output 0 and lse -inf.

    Raises:
        TypeError: an argument is not a tensor or has the wrong kind of dtype.
        ValueError: shapes, dtypes or devices do not fit together; a length, row or padding is out of range; the new
            keys do not fit into the cache; an input shares memory with what is written.
        BackendUnavailable: the named backend does not support this device or dtype.
        RuntimeError: a backward pass reaches the results, because a cache does not support gradients.

    The host must know the lengths: the call waits for each of `cache_seqlens`, `cache_batch_idx` and `cache_leftpad`
    that is a tensor on a GPU, and for `block_table`. An int or a tensor on the CPU is accepted too and does not wait.
    Sequences of one length in the rows 0 .. B - 1 take one call of :func:`foundry_kernels.flash_attention`, rows of
    other lengths and pages one of :func:`foundry_kernels.flash_attention_varlen` (in CUDA's native kernels one each).
    """
    options = translate(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, backend)
    check_num_splits(num_splits)
    caches, rotary = (k_cache, v_cache, k, v), (rotary_cos, rotary_sin, rotary_interleaved)
    where = (cache_seqlens, cache_batch_idx, cache_leftpad)
    if block_table is not None:
        out, lse = append_and_attend_pages(q, caches, rotary, where, block_table, options)
    else:
        out, lse = append_and_attend(q, caches, rotary, where, options)
    return (out, lse) if return_softmax_lse else out


def append_and_attend(
    q: Tensor,
    caches: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    rotary: tuple[Tensor | None, Tensor | None, bool],
    where: tuple[SupportsIndex | Tensor | None, Tensor | None, Tensor | None],
    options: Options,
    qv: Tensor | None = None,
    attention_chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of :func:`flash_attn_with_kvcache`, whose arguments these are: `k_cache`, `v_cache`, `k`, `v`;
    the tables and `rotary_interleaved`; `cache_seqlens`, `cache_batch_idx`, `cache_leftpad`; and FlashAttention 3's."""
    wanted, (q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes) = cut(
        q, *caches, *rotary[:2], options["alibi_slopes"]
    )
    options, interleaved, backend = options | {"alibi_slopes": alibi_slopes}, rotary[2], options["backend"]
    new = check_tensors(q, k_cache, v_cache, k, v, where[1] is not None)
    options = check_qv(qv, q, k_cache, v_cache, options)
    if alibi_slopes is not None:
        check_alibi_slopes(alibi_slopes, Scores(q.shape[0], q.shape[2], q.shape[1], 0, q.dtype, q.device))
    cached = _cached(q, k_cache, new, *where)
    resolve(FLASH_ATTENTION, backend, q)
    if rotary_cos is not None or rotary_sin is not None:
        if k is None or rotary_cos is None or rotary_sin is None:
            raise ValueError(ROTARY)
        resolve(ROPE, backend, q)
        each = options["causal"] or options["window"] is not None or attention_chunk > 0
        q, k = _rotate(q, k, rotary_cos, rotary_sin, cached, each, interleaved, backend)
    if k is not None and v is not None:
        _append(k_cache, k, cached)
        _append(v_cache, v, cached)
    found = _attend(q, k_cache, v_cache, cached, new, options, qv, attention_chunk)
    out, lse = without_backward(found, wanted, NO_GRADIENT)
    return out, lse


def check_num_splits(num_splits: SupportsIndex) -> None:
    if as_int("num_splits", num_splits) < 0:
        raise ValueError(f"num_splits must be an int >= 0; got {num_splits!r}")


def _cached(
    q: Tensor,
    k_cache: Tensor,
    new: int,
    cache_seqlens: SupportsIndex | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
) -> list[_Cached]:
    """Returns each sequence's part of the cache, checked."""
    batch, (rows, size) = q.shape[0], k_cache.shape[:2]
    lengths, at, begins = read_where(batch, new, size, cache_seqlens, cache_batch_idx, cache_leftpad)
    chosen = list(range(batch)) if at is None else at
    for n, (row, begin, length) in enumerate(zip(chosen, begins, lengths, strict=True)):
        if not 0 <= length <= size:
            raise ValueError(
                f"cache_seqlens must be in 0 .. {size}, the size of k_cache; got {length} for sequence {n}"
            )
        if length + new > size:
            raise ValueError(
                f"k_cache is full: sequence {n} has {length} of {size} positions (cache_seqlens), {new} more do not fit"
            )
        if not 0 <= row < rows:
            raise ValueError(f"cache_batch_idx must be in 0 .. {rows - 1}, k_cache's rows; got {row} for sequence {n}")
        if not 0 <= begin <= length:
            raise ValueError(f"cache_leftpad must be in 0 .. cache_seqlens={length}; got {begin} for sequence {n}")
    if new and any(a == b for a, b in pairwise(sorted(chosen))):
        raise ValueError(f"cache_batch_idx must name no row twice where new keys are stored; got {chosen}")
    return [_Cached(*found) for found in zip(chosen, begins, lengths, strict=True)]


def _in_common(cached: list[_Cached]) -> _Cached | None:
    """Returns what all sequences have in common, if they are the rows 0 .. B - 1 and of one length."""
    alike = all(part == (n, *cached[0][1:]) for n, part in enumerate(cached))
    return cached[0] if cached and alike else None


def _rotate(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    cached: list[_Cached],
    each: bool,
    interleaved: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """q and k rotated by the positions after the cached keys; with `each` False, all queries by the first of them.

    A slice of the tables is enough for sequences of one length; otherwise each token has its own row.
    """
    after = max((part.length for part in cached), default=0) + max(k.shape[1], q.shape[1] if each else 1)
    check_tables(cos, sin, after)
    one = _in_common(cached)

    def rotate(q: Tensor, k: Tensor, count: int, step: int) -> tuple[Tensor, Tensor]:
        """Tokens 0 .. count - 1 at positions ``length + step * i``."""
        tables, positions = (cos, sin), None
        if one is not None and step:
            tables = (cos[one.length : one.length + count], sin[one.length : one.length + count])
        else:
            first = torch.tensor([part.length for part in cached], dtype=torch.int64)
            positions = (first[:, None] + step * torch.arange(count)).to(q.device, non_blocking=True)
        found = rope(q, k, *tables, interleaved=interleaved, positions=positions, backend=backend)
        return found[0], found[1]

    q, k = q.transpose(1, 2), k.transpose(1, 2)
    if each and q.shape[2] == k.shape[2]:
        q, k = rotate(q, k, q.shape[2], 1)
    else:
        q, _ = rotate(q, q[:, :0], q.shape[2], int(each))
        k, _ = rotate(k, k[:, :0], k.shape[2], 1)
    return q.transpose(1, 2), k.transpose(1, 2)


def _append(cache: Tensor, new: Tensor, cached: list[_Cached]) -> None:
    """Appends ``new [B, T_new, Hk, D]`` to what each sequence has."""
    batch, count = new.shape[:2]
    if (one := _in_common(cached)) is not None:
        cache[:batch, one.length : one.length + count] = new
        return
    for n, (row, _, length) in enumerate(cached):
        cache[row, length : length + count] = new[n]


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cached: list[_Cached],
    new: int,
    options: Options,
    qv: Tensor | None,
    attention_chunk: int,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of the queries over their sequences' part of the cache, in place: a dense call where that is the same
    of all; else a row is a page of its own, and what reads no pages gets a dense call for each."""
    one, everyone = _in_common(cached), slice(0, len(cached))
    if one is None and _reads_pages(q, k_cache, v_cache, options) and qv is None and not attention_chunk:
        batch, n_queries = q.shape[:2]
        lengths, begins = [part.length for part in cached], [part.begin for part in cached]
        table = [[part.row] for part in cached]
        places = Places(table, lengths, begins, [n_queries] * batch, [new] * batch)
        out, lse = attend_places(q.flatten(0, 1), k_cache, v_cache, places, options)
        return out.unflatten(0, (batch, n_queries)), lse.unflatten(1, (batch, n_queries)).transpose(0, 1)
    groups = (
        [(everyone, everyone, one)]
        if one
        else [(slice(n, n + 1), slice(s.row, s.row + 1), s) for n, s in enumerate(cached)]
    )
    found, alibi_slopes = [], options["alibi_slopes"]
    for sequences, rows, part in groups:
        keys = slice(part.begin, part.length + new)
        qn, kn, vn = (x.transpose(1, 2) for x in (q[sequences], k_cache[rows, keys], v_cache[rows, keys]))
        slopes = alibi_slopes
        if slopes is not None and slopes.dim() == 2:
            slopes = slopes[sequences]
        of_qv = None if qv is None else qv[sequences].transpose(1, 2)
        out, lse = attend(qn, kn, vn, of_qv, attention_chunk, options | {"alibi_slopes": slopes})
        found.append((out.transpose(1, 2), lse))
    if not found:
        out = q.new_empty((*q.shape[:3], v_cache.shape[3]))
        return out, q.new_empty(0, *q.shape[2:0:-1], dtype=torch.promote_types(q.dtype, torch.float32))
    out, lse = (x[0] if len(x) == 1 else torch.cat(x) for x in zip(*found, strict=True))
    return out, lse


def _reads_pages(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: Options) -> bool:
    whole = all(x.stride(3) == 1 and x.shape[1] > 0 for x in (k_cache, v_cache))
    return whole and q.numel() > 0 and not (q.is_cuda and options["backend"] == "native")
