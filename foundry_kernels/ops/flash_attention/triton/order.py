"""Which tile a program works on. A GPU starts programs in the order of their numbers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def program_order(n_batch, n_heads, section):
    """(n, head, tile, number of tiles) of this program.

    Heads are taken in sections of `section` heads, whose keys fit the L2 cache together. Within a section, tiles vary
    slowest and heads fastest. So the tiles of a head, and the heads of a group, reuse data in L2.
    """
    pid = tl.program_id(0)
    heads = n_batch * n_heads
    tiles = tl.num_programs(0) // heads
    first = pid // (section * tiles) * section
    size = tl.minimum(section, heads - first)
    within = pid - first * tiles
    which = first + within % size
    return (which // n_heads).to(tl.int64), (which % n_heads).to(tl.int64), within // size, tiles
