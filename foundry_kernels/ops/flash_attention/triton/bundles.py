"""What travels together through the kernels of attention: a kernel makes these tuples once and hands them on, and the
compiler leaves nothing of them.

In tuples of values, None stands for what is absent, and the compiler decides `is not None`. An assignment turns the
constants in a tuple into values, so constants have one of their own: `sizes: tl.constexpr = Sizes(...)`. A function may
take a tuple with a None in it but not return one, which Triton 3.6 does not compile. Triton's cache on disk does not
notice changes of this file: whoever exchanges two fields has to empty it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Scoring(NamedTuple):
    """What makes scores of products, in units of log2(e), see `scores`."""

    scale: Any
    softcap: Any
    slope: Any  # of ALiBi, of the head at hand or of each row [M, 1]


class Mask(NamedTuple):
    """How far a query sees to either side of its position."""

    left: Any
    right: Any


class Dropout(NamedTuple):
    """What decides which weights are kept, and what these are multiplied by, see `kept`."""

    low: Any
    high: Any
    n: Any
    head: Any  # the one at hand, or that of each row [M, 1]
    least: Any
    scale: Any
    zero: Any
    nothing: Any


class Rows(NamedTuple):
    """Rows of one head: a pointer to the first, and how far they lie apart."""

    ptr: Any
    stride: Any


class Keys(NamedTuple):
    """The keys and values of one head of a sequence, and how many there are."""

    k: Rows
    v: Rows
    seqlen: Any


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
    """Constants: the widths of heads, rounded up to powers of two as blocks, and the rows of the tiles of queries and
    of keys."""

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
