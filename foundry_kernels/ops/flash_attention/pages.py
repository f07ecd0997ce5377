"""Keys and values in pages ``[num_blocks, page_block_size, Hk, D]``. Each sequence has some of the pages, in any order.

The key at position p of sequence n is row ``p % page_block_size`` of page ``block_table[n, p // page_block_size]``.
Sequence n attends to the positions ``leftpad_k[n] .. seqused_k[n] - 1``. Entries of the table beyond these are not
read, and a page may belong to several sequences.

Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023,
arXiv:2309.06180.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from foundry_kernels.core.checks import check_device, check_integer, check_shape


class Pages(NamedTuple):
    """The options that locate the keys of each sequence; all are None if there are no pages."""

    block_table: Tensor | None  # [B, max_blocks]
    seqused_k: Tensor | None  # [B], one past the last position that is attended to
    leftpad_k: Tensor | None  # [B], the first such position; None: 0


NO_PAGES = Pages(None, None, None)


def check_pages(
    block_table: Tensor, seqused_k: Tensor, leftpad_k: Tensor | None, batch: int, k: Tensor, names: tuple[str, str, str]
) -> Pages:
    """Checks the tables of keys ``[num_blocks, page_block_size, Hk, D]``; and their values, if reading them does not
    wait for a GPU. `names`: what the caller calls `seqused_k`, `leftpad_k` and k."""
    check_integer("block_table", block_table, 2, "[B, max_blocks]")
    check_shape("block_table", block_table, (batch, block_table.shape[1]), "a row for each sequence")
    check_device("block_table", block_table, names[2], k)
    for name, x in zip(names, (seqused_k, leftpad_k), strict=False):
        if x is not None:
            check_integer(name, x)
            check_shape(name, x, (batch,), "one for each sequence")
            check_device(name, x, names[2], k)
    tables = [x for x in (block_table, seqused_k, leftpad_k) if x is not None]
    if k.is_cpu and not is_compiling() and all(type(x) is Tensor for x in tables):
        check_page_values(block_table, seqused_k, leftpad_k, k, names)
    return Pages(block_table, seqused_k, leftpad_k)


def check_page_values(
    block_table: Tensor, seqused_k: Tensor, leftpad_k: Tensor | None, k: Tensor, names: tuple[str, str, str]
) -> None:
    """Checks that lengths fit into the table and that pages exist. Call it only if reading them does not wait for a
    GPU."""
    n_pages, size = k.shape[:2]
    most = block_table.shape[1] * size
    if bool(((seqused_k < 0) | (seqused_k > most)).any()):
        raise ValueError(
            f"{names[0]} must be in 0 .. {most}, what block_table's {block_table.shape[1]} pages of {size} hold; "
            f"got {seqused_k.tolist()}"
        )
    if leftpad_k is not None and bool(((leftpad_k < 0) | (leftpad_k > seqused_k)).any()):
        raise ValueError(f"{names[1]} must be in 0 .. {names[0]} of each sequence; got {leftpad_k.tolist()}")
    place = torch.arange(block_table.shape[1], device=block_table.device)
    used = place < ((seqused_k + (size - 1)) // size)[:, None]
    if leftpad_k is not None:
        used &= place >= (leftpad_k // size)[:, None]
    wrong = used & ((block_table < 0) | (block_table >= n_pages))
    if bool(wrong.any()):
        n, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_table must be in 0 .. {n_pages - 1}, the pages of {names[2]}, where a sequence has positions; got "
            f"{int(block_table[n, column])} for page {column} of sequence {n}"
        )


def rows_of_sequence(x: Tensor, block_table: Tensor, begin: int, end: int) -> Tensor:
    """The positions begin .. end - 1 ``[end - begin, Hk, D]`` of a sequence, whose row of the table this is: a copy, or
    a view where they are in one page."""
    size = x.shape[1]
    if begin < end and begin // size == (end - 1) // size:
        return x[int(block_table[begin // size]), begin % size : begin % size + end - begin]
    pages = block_table[begin // size : -(-end // size)].to(torch.int64)
    first = begin // size * size
    return x[pages].flatten(0, 1)[begin - first : end - first]


def rows_of_all(x: Tensor, block_table: Tensor) -> Tensor:
    """A copy ``[B, max_blocks * page_block_size, Hk, D]`` of all pages in the table, without reading the table on the
    host; entries that are out of range count as the nearest page."""
    if x.shape[0] == 0:
        x = x.new_zeros(1, *x.shape[1:])
    return x[block_table.to(torch.int64).clamp(0, x.shape[0] - 1)].flatten(1, 2)
