"""flash-attn's paged key-value cache: new keys and values are written to the pages, then one launch attends to all.

A cache of rows ``[rows, S, Hk, D]`` is a cache with pages of S positions, one for each sequence.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from foundry_kernels.compat.cache_checks import NO_GRADIENT, ROTARY, check_tables, check_tensors, read_where
from foundry_kernels.core.checks import check_device, check_integer, check_rank, check_tensor
from foundry_kernels.core.inference import cut, without_backward
from foundry_kernels.core.registry import BackendUnavailable, resolve
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION_VARLEN, Options, flash_attention_varlen
from foundry_kernels.ops.flash_attention.checks import Scores, check_alibi_slopes
from foundry_kernels.ops.rope import ROPE, rope


class Places(NamedTuple):
    """Where the sequences of a call are, on the host, and how many tokens each has."""

    table: list[list[int]]  # the pages of each sequence
    lengths: list[int]  # positions that are cached
    begins: list[int]  # the first that is attended to
    queries: list[int]
    new: list[int]  # positions that are appended

    @property
    def ends(self) -> list[int]:
        return [length + new for length, new in zip(self.lengths, self.new, strict=True)]


class _Written(NamedTuple):
    """What a sequence appends to the page of one column of its table."""

    sequence: int
    column: int
    first: int  # position in the page
    last: int


def read_table(block_table: Tensor, rows: list[int] | None, batch: int, k_cache: Tensor, named: str) -> list[list[int]]:
    """The pages of each sequence: a row of the table, that of `rows` where sequences choose theirs."""
    check_integer(named, block_table, 2, "[B, max_blocks]")
    if block_table.device != k_cache.device and not block_table.is_cpu:
        check_device(named, block_table, "k_cache", k_cache)
    if rows is None and block_table.shape[0] != batch:
        raise ValueError(
            f"{named} must have a row for each of {batch} sequences without cache_batch_idx; "
            f"got {tuple(block_table.shape)}"
        )
    table: list[list[int]] = block_table.tolist()
    for n, row in enumerate(rows or ()):
        if not 0 <= row < len(table):
            raise ValueError(
                f"cache_batch_idx must be in 0 .. {len(table) - 1}, {named}'s rows; got {row} for sequence {n}"
            )
    return table if rows is None else [table[row] for row in rows]


def check_places(places: Places, k_cache: Tensor, named: str) -> None:
    """Checks that all reads and writes are within the cache, and that no sequence writes to positions of another one.

    Raises:
        ValueError: it names what does not fit. `named`: the table in errors.
    """
    n_pages, size = k_cache.shape[:2]
    written: dict[int, list[_Written]] = {}  # by page
    for n, (pages, length, end) in enumerate(zip(places.table, places.lengths, places.ends, strict=True)):
        most = len(pages) * size
        if not 0 <= length <= most:
            raise ValueError(
                f"cache_seqlens must be in 0 .. {most}, what {named}'s {len(pages)} pages of {size} hold; "
                f"got {length} for sequence {n}"
            )
        if end > most:
            raise ValueError(
                f"{named} is too short: sequence {n} has {length} of {most} positions (cache_seqlens), "
                f"{end - length} more do not fit"
            )
        if not 0 <= places.begins[n] <= length:
            raise ValueError(
                f"cache_leftpad must be in 0 .. cache_seqlens={length}; got {places.begins[n]} for sequence {n}"
            )
        for i in range(places.begins[n] // size, -(-end // size)):
            if not 0 <= pages[i] < n_pages:
                raise ValueError(
                    f"{named} must be in 0 .. {n_pages - 1}, the pages of k_cache, where a sequence has positions; "
                    f"got {pages[i]} for page {i} of sequence {n}"
                )
        for i in range(length // size, -(-end // size)) if end > length else ():
            first, last = max(length - i * size, 0), min(end - i * size, size) - 1
            written.setdefault(pages[i], []).append(_Written(n, i, first, last))
    for page, writers in written.items():
        writers.sort(key=lambda writer: writer.first)
        for one, other in pairwise(writers):
            if other.first <= one.last:
                raise ValueError(
                    f"{named} must give sequences that append pages of their own: {one.sequence} and {other.sequence} "
                    f"write to position {other.first} of page {page}"
                )
    for n, (pages, length) in enumerate(zip(places.table, places.lengths, strict=True) if written else ()):
        for i in range(places.begins[n] // size, -(-length // size)):
            for other in written.get(pages[i], ()):
                if (other.sequence, other.column) != (n, i) and other.first < length - i * size:
                    raise ValueError(
                        f"{named} must give sequences that append pages of their own: {other.sequence} would write "
                        f"over what {n} has in page {pages[i]}"
                    )


def rotated(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, places: Places, each: bool, interleaved: bool, backend: str
) -> tuple[Tensor, Tensor]:
    """Rotates packed q ``[total_q, H, D]`` and new keys ``[total_new, Hk, D]`` at the positions after the cache; with
    `each` False, all queries of a sequence at the first of these positions."""

    def rotate(x: Tensor, counts: list[int], step: int) -> Tensor:
        at = [n + step * i for n, count in zip(places.lengths, counts, strict=True) for i in range(count)]
        if not at:
            return x
        positions = torch.tensor(at, dtype=torch.int64).to(x.device, non_blocking=True)
        heads = x.transpose(0, 1)[None]
        found, _ = rope(heads, heads[:, :0], cos, sin, interleaved=interleaved, positions=positions, backend=backend)
        return found[0].transpose(0, 1)

    return rotate(q, places.queries, int(each)), rotate(k, places.new, 1)


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, places: Places) -> None:
    """Writes packed new keys and values ``[total_new, Hk, D]`` behind what each sequence has, where it lies."""
    size = k_cache.shape[1]
    each = zip(places.table, places.lengths, places.ends, strict=True)
    at = [(pages[p // size], p % size) for pages, length, end in each for p in range(length, end)]
    if at:
        page, offset = torch.tensor(at, dtype=torch.int64).to(k_cache.device, non_blocking=True).unbind(1)
        k_cache[page, offset] = k
        v_cache[page, offset] = v


def attend_places(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, places: Places, options: Options
) -> tuple[Tensor, Tensor]:
    """(out ``[total_q, H, Dv]``, lse ``[H, total_q]``) of packed q ``[total_q, H, D]``, by one launch."""

    def made(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).to(q.device, non_blocking=True)

    ends = places.ends
    used = max((-(-end // k_cache.shape[1]) for end in ends), default=0)
    table = made([pages[:used] + [0] * (used - len(pages)) for pages in places.table]).reshape(len(ends), used)
    return flash_attention_varlen(
        q, k_cache, v_cache, made([0, *accumulate(places.queries)]), None, max(places.queries, default=0),
        max(ends, default=0), block_table=table, seqused_k=made(ends),
        leftpad_k=made(places.begins) if any(places.begins) else None, return_lse=True, **options,
    )  # fmt: skip


def append_and_attend_pages(
    q: Tensor,
    caches: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    rotary: tuple[Tensor | None, Tensor | None, bool],
    where: tuple[SupportsIndex | Tensor | None, Tensor | None, Tensor | None],
    block_table: Tensor | None,
    options: Options,
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None),
    named: str = "block_table",
) -> tuple[Tensor, Tensor]:
    """(out, softmax_lse) of `flash_attn_with_kvcache`, of caches in pages or, without a table, in rows.

    cu_seqlens: of queries and of new keys that are packed; ``(None, None)``: all sequences have as many. named: the
    table in errors.
    """
    wanted, (q, k_cache, v_cache, k, v, cos, sin, alibi_slopes) = cut(q, *caches, *rotary[:2], options["alibi_slopes"])
    rotary, options = (cos, sin, rotary[2]), options | {"alibi_slopes": alibi_slopes}
    of_q, of_k = cu_seqlens
    if of_q is None:
        n_new = check_tensors(q, k_cache, v_cache, k, v, True)
        batch, n_queries = q.shape[:2]
        queries, new = [n_queries] * batch, [n_new] * batch
        packed_q, fresh = q.flatten(0, 1), None
        if k is not None and v is not None:
            fresh = (k.flatten(0, 1), v.flatten(0, 1))
    else:
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x is not None:
                check_tensor(name, x)
                check_rank(name, x, 3, "[total, heads, head_dim] with cu_seqlens_q")
        check_tensors(q[None], k_cache, v_cache, None if k is None else k[None], None if v is None else v[None], True)
        queries = _lengths("cu_seqlens_q", of_q, q)
        batch, new = len(queries), [0] * len(queries)
        if k is not None:
            if of_k is None:
                raise ValueError("cu_seqlens_k_new must be given with cu_seqlens_q and new keys k; got None")
            new = _lengths("cu_seqlens_k_new", of_k, k, batch)
        packed_q, fresh = q, None if k is None or v is None else (k, v)
    _check_slopes(options, packed_q, batch)
    # Rows are full where no lengths are given.
    size = k_cache.shape[1] if block_table is None else None
    lengths, chosen, begins = read_where(batch, sum(new), size, *where)
    if block_table is None:
        block_table, named = torch.arange(k_cache.shape[0])[:, None], "k_cache"
    table = read_table(block_table, chosen, batch, k_cache, named)
    places = Places(table, lengths, begins, queries, new)
    found = _attend_places(packed_q, fresh, (k_cache, v_cache), places, rotary, options, named)
    out, lse = without_backward(found, wanted, NO_GRADIENT)
    if of_q is not None:
        return out, lse
    shape = (batch, q.shape[1])
    return out.unflatten(0, shape), lse.unflatten(1, shape).transpose(0, 1)


def _lengths(name: str, cu_seqlens: Tensor, x: Tensor, batch: int | None = None) -> list[int]:
    check_integer(name, cu_seqlens, 1, "[B + 1]")
    values = cu_seqlens.tolist()
    found = [after - before for before, after in pairwise(values)]
    if not values or values[0] != 0 or values[-1] != x.shape[0] or min(found, default=0) < 0:
        raise ValueError(f"{name} must start at 0, never decrease and end at the {x.shape[0]} tokens; got {values}")
    if batch is not None and len(found) != batch:
        raise ValueError(f"{name} must have a length for each of the {batch} sequences of cu_seqlens_q; got {values}")
    return found


def _check_slopes(options: Options, q: Tensor, batch: int) -> None:
    if (slopes := options["alibi_slopes"]) is not None:
        check_alibi_slopes(slopes, Scores(batch, q.shape[-2], q.shape[-3], 0, q.dtype, q.device))


def _attend_places(
    q: Tensor,
    fresh: tuple[Tensor, Tensor] | None,
    caches: tuple[Tensor, Tensor],
    places: Places,
    rotary: tuple[Tensor | None, Tensor | None, bool],
    options: Options,
    named: str,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of packed queries; `fresh` are packed new keys and values."""
    cos, sin, interleaved = rotary
    backend = options["backend"]
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        if cache.stride(3) != 1 and cache.shape[3] > 1:
            raise ValueError(f"{name} must have a last stride of 1: pages are not copied; got {cache.stride()}")
        if cache.shape[1] == 0:
            raise ValueError(f"{name} must have pages of at least one position; got {tuple(cache.shape)}")
    check_places(places, caches[0], named)
    resolve(FLASH_ATTENTION_VARLEN, backend, q)
    if backend == "native" and q.is_cuda:
        raise BackendUnavailable("flash_attn_with_kvcache: backend 'native': its CUDA kernels read no pages")
    if cos is not None or sin is not None:
        if fresh is None or cos is None or sin is None:
            raise ValueError(ROTARY)
        resolve(ROPE, backend, q)
        each = options["causal"] or options["window"] is not None
        counts = zip(places.lengths, places.queries, places.new, strict=True)
        after = max((n + max(new, i if each else min(i, 1)) for n, i, new in counts), default=0)
        check_tables(cos, sin, after)
        q, k = rotated(q, fresh[0], cos, sin, places, each, interleaved, backend)
        fresh = (k, fresh[1])
    if fresh is not None:
        append(*caches, *fresh, places)
    return attend_places(q, *caches, places, options)
