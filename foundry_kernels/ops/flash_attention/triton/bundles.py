"""Tuples of values that the kernels of attention get and pass to their functions. The compiler removes them.

In a tuple of values, None means absent, and the compiler evaluates `is not None`. An assignment turns the constants in
a tuple into values, so constants have a tuple of their own: `sizes: tl.constexpr = Sizes(...)`. A function may take a
tuple with a None in it. It must not return one, or take one inside of another tuple, because Triton 3.6 compiles
neither. Triton's cache on disk does not notice changes of this file, so empty it after exchanging two fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Mask(NamedTuple):
    """How far a query sees to the left and right of its position; None is unlimited."""

    left: Any
    right: Any


class HeadStrides(NamedTuple):
    """The strides of a sequence, a head and a token; of pages, the first is that of a page."""

    b: Any
    h: Any
    t: Any


class PairStrides(NamedTuple):
    """The strides of a tensor over pairs of a query and a key, 0 for a broadcast dimension; None without the tensor."""

    b: Any
    h: Any
    t: Any
    s: Any


class ListStrides(NamedTuple):
    """The strides of the lists of tiles; None without lists."""

    b: Any
    h: Any
    r: Any  # from one tile of rows to the next


class Dense(NamedTuple):
    """A dense mask or bias, see `load_dense`."""

    ptr: Any  # to each of the tile's rows [M, 1], or one pointer if all rows are the same
    m_rows: Any  # which rows exist; None if all pointers are valid
    stride: Any  # between the tile's columns, None if they are the same


class Modifier(NamedTuple):
    """What a printed score function reads, see `score_print`."""

    b: Any  # int32: the sequence
    h: Any  # the head, or one for each row [M, 1]
    at: Any  # the places of the tile's rows [M, 1] or [N, 1], which do not change in the loop
    pointers: Any  # to the captured tensors
    layout: Any  # their sizes and strides
    ready: Any  # what `prepare` loaded


class Bits(NamedTuple):
    """A mask by tiles, see `bits_of_rows` and `bits_of_keys`."""

    tiles: Any  # pointers, for the tile's rows [M, 1] or for one head
    words: Any
    stride: Any  # between tiles of keys, or between tiles of queries and between tiles of keys


class Dropout(NamedTuple):
    """The state of the random generator, which decides the weights to keep (see `kept`), and the factor for these."""

    low: Any  # of the seed
    high: Any
    n: Any
    head: Any  # the current one, or one for each row [M, 1]
    least: Any
    scale: Any
    zero: Any  # replaces a weight that is not kept


class Pairs(NamedTuple):
    """Options that decide about single pairs of a query and a key; None if an option is off."""

    bits: Any  # Bits
    dropout: Any  # Dropout


class Rows(NamedTuple):
    """Rows of one head: a pointer to the first row, and the stride."""

    ptr: Any
    stride: Any


class Keys(NamedTuple):
    """The keys and values of one head of a sequence, and their number."""

    k: Rows
    v: Rows
    seqlen: Any


class Pages(NamedTuple):
    """Where the pages of a sequence are, see `pages`."""

    table: Any  # pointer to the sequence's row
    start: Any  # the position of key 0
    last: Any  # the highest page number
    stride_k: Any  # from page to page
    stride_v: Any


class State(NamedTuple):
    """The running softmax of each row [M], see `softmax`."""

    m: Any
    l: Any  # noqa: E741
    e: Any


class Results(NamedTuple):
    """Pointers to the results for each row besides out."""

    lse: Any
    entropy: Any
    max_logit: Any


class Range(NamedTuple):
    """The columns that a tile of rows visits, see `block_range`."""

    start: Any
    full_start: Any
    full_stop: Any
    stop: Any


class Saved(NamedTuple):
    """The values that the backward pass reads for each row: pointers, or a tile's values."""

    lse_high: Any
    lse_low: Any
    delta: Any


class Sizes(NamedTuple):
    """Constants: the head dimensions, the same rounded up to powers of two (BLOCK_D, BLOCK_DV), the numbers of queries
    and keys in a tile, and whether PTX may be used."""

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    PTX: Any
