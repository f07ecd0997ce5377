"""Which keys a query sees, and which queries see a key."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def between(pos, first, last):
    """Returns whether first <= pos <= last; one limit may be None. The limits belong to a row of the tile, so an
    element costs one comparison for each limit."""
    if last is None:
        return pos >= first
    elif first is None:
        return pos <= last
    else:
        return (pos >= first) & (pos <= last)


@triton.jit
def seen_keys(j0, BLOCK_N: tl.constexpr, q_pos, seqlen_k, mask):
    """Which of the keys from j0 on [1, N] exist and are in the window of the queries at q_pos [M, 1]. The limits are
    shifted by j0, not the keys, because a tile has fewer rows than elements."""
    cols = tl.arange(0, BLOCK_N)[None, :]
    first = q_pos - mask.left - j0 if mask.left is not None else None
    if mask.right is not None:
        return between(cols, first, tl.minimum(q_pos + mask.right, seqlen_k - 1) - j0)
    elif mask.left is not None:
        return (cols >= first) & (cols < seqlen_k - j0)
    else:
        return cols < seqlen_k - j0


@triton.jit
def seeing_queries(rows, k_pos, i0, mask):
    """Returns which of the queries i0 + rows [1, M] have a key in their window. k_pos [N, 1] are the keys' positions
    among the queries."""
    first = k_pos - mask.right - i0 if mask.right is not None else None
    last = k_pos + mask.left - i0 if mask.left is not None else None
    return between(rows, first, last)


@triton.jit
def in_window(rel_pos, mask):
    """`rel_pos` is the key's position minus the query's, after alignment."""
    return between(rel_pos, -mask.left if mask.left is not None else None, mask.right)
