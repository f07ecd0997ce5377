"""Which tile a program works on: the order of programs is that in which a GPU begins them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def program_order(n_batch, n_heads, section):
    """(n, head, tile, number of tiles) of this program.

    The sequences' heads are taken `section` of them at a time, as many as share the L2 cache; a section's tiles vary
    slowest, its heads fastest. So a head's tiles, and the heads of a group, find in L2 what another one has read.
    """
    pid = tl.program_id(0)
    heads = n_batch * n_heads
    tiles = tl.num_programs(0) // heads
    first = pid // (section * tiles) * section
    size = tl.minimum(section, heads - first)
    within = pid - first * tiles
    which = first + within % size
    return (which // n_heads).to(tl.int64), (which % n_heads).to(tl.int64), within // size, tiles
