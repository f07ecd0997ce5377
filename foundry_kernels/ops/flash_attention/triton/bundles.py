"""What travels together through the kernels of attention: a kernel makes these tuples once and hands them on, and the
compiler leaves nothing of them.

In tuples of values, None stands for what is absent, and the compiler decides `is not None`. An assignment turns the
constants in a tuple into values, so constants have one of their own: `sizes: tl.constexpr = Sizes(...)`. A function may
take a tuple with a None in it, but not return one, nor take one inside of another tuple: Triton 3.6 compiles neither.
Triton's cache on disk does not notice changes of this file: whoever exchanges two fields has to empty it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Scoring(NamedTuple):
    """The parameters that turn matmul results into scores, in units of log2(e) or, with a bias, in natural units; see
    `scores`."""

    scale: Any
    softcap: Any
    slope: Any  # of ALiBi, of the head at hand or of each row [M, 1]
    bias: Any  # not None where a bias is added


class Mask(NamedTuple):
    """How far a query sees to either side of its position."""

    left: Any
    right: Any


class Dense(NamedTuple):
    """A dense mask or bias, see `load_dense`."""

    ptr: Any  # of the tile's rows [M, 1], or of what is the same for all of them
    m_rows: Any  # which rows there are, None where pointers to all of them are valid
    stride: Any  # of the tile's columns, None where they are the same


class Bits(NamedTuple):
    """A mask by tiles, see `bits_of_rows` and `bits_of_keys`."""

    tiles: Any  # of the tile's rows [M, 1], or of one head
    words: Any
    stride: Any  # of the tiles of keys, or of those of queries and of keys


class Dropout(NamedTuple):
    """What decides which weights are kept, see `kept`, and what these are multiplied by."""

    low: Any  # of the seed
    high: Any
    n: Any
    head: Any  # the one at hand, or that of each row [M, 1]
    least: Any
    scale: Any
    zero: Any  # what is left of a weight that is not kept


class Pairs(NamedTuple):
    """What else decides about each pair of a query and a key. None where it is off."""

    allowed: Any  # not None where a dense mask hides some
    bits: Any  # Bits
    dropout: Any  # Dropout


class Rows(NamedTuple):
    """Rows of one head: a pointer to the first, and how far they lie apart."""

    ptr: Any
    stride: Any


class Keys(NamedTuple):
    """The keys and values of one head of a sequence, and how many there are."""

    k: Rows
    v: Rows
    seqlen: Any


class Pages(NamedTuple):
    """Where the pages of a sequence are, see `pages`."""

    table: Any  # pointer to the sequence's row
    start: Any  # the position of key 0
    last: Any  # the number of the last page that there is
    stride_k: Any  # from page to page
    stride_v: Any


class State(NamedTuple):
    """The running softmax of each row [M], see `softmax`."""

    m: Any
    l: Any  # noqa: E741
    e: Any


class Results(NamedTuple):
    """Pointers to what is kept of each row besides out."""

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
    """What the backward pass reads of each row: pointers, or the values of a tile's rows."""

    lse_log2: Any
    lse_low: Any
    delta: Any


class Sizes(NamedTuple):
    """Constants: the widths of heads, rounded up to powers of two as blocks, the rows of the tiles of queries and of
    keys, and whether some code may be written in PTX."""

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    PTX: Any
