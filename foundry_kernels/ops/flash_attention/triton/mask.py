"""Which keys a query sees."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def in_window(rel_pos, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """`rel_pos` is the key's position minus the query's, after alignment."""
    m_seen = rel_pos == rel_pos
    if HAS_LEFT:
        m_seen = m_seen & (rel_pos >= -left)
    if HAS_RIGHT:
        m_seen = m_seen & (rel_pos <= right)
    return m_seen
