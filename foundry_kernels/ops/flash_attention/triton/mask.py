"""Which keys a query sees, and which queries see a key."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def between(pos, first, last, HAS_FIRST: tl.constexpr, HAS_LAST: tl.constexpr):
    """Whether first <= pos <= last. The limits belong to a row of the tile: so an element costs one comparison each."""
    m_seen = pos == pos
    if HAS_FIRST and HAS_LAST:
        m_seen = (pos >= first) & (pos <= last)
    elif HAS_FIRST:
        m_seen = pos >= first
    elif HAS_LAST:
        m_seen = pos <= last
    return m_seen


@triton.jit
def seen_keys(j0, BLOCK_N: tl.constexpr, q_pos, seqlen_k, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """Which of the keys from j0 on [1, N] are there, and in the window of the queries at q_pos [M, 1]. What moves with
    j0 are the limits: there are fewer rows than elements."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    if HAS_RIGHT:
        return between(cols, q_pos - left - j0, tl.minimum(q_pos + right, seqlen_k - 1) - j0, HAS_LEFT, True)
    elif HAS_LEFT:
        return (cols >= q_pos - left - j0) & (cols < seqlen_k - j0)
    else:
        return cols < seqlen_k - j0


@triton.jit
def in_window(rel_pos, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """`rel_pos` is the key's position minus the query's, after alignment."""
    return between(rel_pos, -left, right, HAS_LEFT, HAS_RIGHT)
