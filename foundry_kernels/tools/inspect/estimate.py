"""How fast a loop of asynchronous products would run on an H100, by its machine code: an estimate that no GPU has made.

A multiprocessor at 1.65 GHz, of 132: products as `sass` counts their cycles, one instruction a cycle from each of four
schedulers, 16 exponentials a cycle. What is not a product takes 0.88 of the cycles of both together. Products that
exponentials follow before the wait for them overlap the part of the rest that those exponentials are a share of; of the
shorter of both 0.64 is gained. The factors were fitted to published results, which docs/performance.md names, so expect
an error of 12 % at least. Not counted: other programs on the multiprocessor, which hide some more, what comes before
and after the loop, that programs are unequal, and memory.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foundry_kernels._triton.devices import device_of
from foundry_kernels.tools.inspect.sass import Loop

MULTIPROCESSORS, HERTZ = device_of(90).multiprocessors, 1.65e9
EXPONENTIALS_A_CYCLE = 16
REST, GAINED = 0.88, 0.64


@dataclass(frozen=True)
class Estimate:
    """Cycles of one round of the loop, and the TFLOP/s of its products, all of them."""

    products: float
    issue: float
    exponentials: float
    together: float
    tflops: float

    def __str__(self) -> str:
        return (
            f"estimate for an H100: {self.products:.0f} cycles of products, {self.issue:.0f} of issue, "
            f"{self.exponentials:.0f} of exponentials; {self.together:.0f} together, {self.tflops:.0f} TFLOP/s"
        )


def estimate(loop: Loop, warps: int) -> Estimate | None:
    """Estimates a loop of one program of so many warps; None for a loop without asynchronous products."""
    if not loop.multiply_adds:
        return None
    groups = warps / 4
    issue = (loop.instructions - loop.skipped) * groups
    special = loop.counts.get("exponential", 0) + loop.counts.get("special", 0)
    exponentials = special * warps * 32 / EXPONENTIALS_A_CYCLE
    rest, products = REST * (issue + exponentials), loop.product_cycles * groups
    hidden = rest * loop.hidden / max(loop.counts.get("exponential", 0), 1)
    together = products + rest - GAINED * min(loop.overlapped_cycles * groups, hidden)
    tflops = 2 * loop.multiply_adds * groups / together * MULTIPROCESSORS * HERTZ / 1e12
    return Estimate(products, issue, exponentials, together, tflops)


#: Cycles of a program beside its loop that no estimate from machine code has: until its first product (q and the first
#: keys from memory), after its last one, and to be begun; and of one that finds nothing to do. Round figures.
BEFORE_AND_AFTER, BEGUN, EMPTY = 2000, 500, 700


def last_end(cycles: Iterable[float], at_once: int) -> float:
    """When the last of programs that take so many cycles ends, if each begins, in order, where one has ended."""
    ends = [0.0] * at_once
    for each in cycles:
        heapq.heapreplace(ends, ends[0] + each)
    return max(ends)


def persistent_gain(
    lengths: Sequence[int], n_heads: int, cycles_a_tile: float, *, causal: bool = True, section: int = 0,
    tile: tuple[int, int] = (128, 64), at_once: int = MULTIPROCESSORS,
) -> tuple[float, float]:  # fmt: skip
    """By how much attention forward would be faster at the most if programs lived on and took one tile of queries after
    another, in place of one program a tile in the order of `order.program_order`: (with what that saves for sure, and
    if it hid all that comes before and after a loop too). The tiles are then divided as well as can be.

    `section` heads, of all sequences, are taken at a time, 0 for all.
    """
    m, n = tile
    tiles, heads = -(-max(lengths) // m), len(lengths) * n_heads
    usual: list[float] = []
    loops: list[float] = []
    for first in range(0, heads, section or heads):
        for i in reversed(range(tiles)) if causal else range(tiles):
            for head in range(first, min(first + (section or heads), heads)):
                length = lengths[head // n_heads]
                if i * m >= length:
                    usual.append(EMPTY)
                    continue
                keys = min((i + 1) * m, length) if causal else length
                loops.append(-(-keys // n) * cycles_a_tile)
                usual.append(loops[-1] + BEFORE_AND_AFTER + BEGUN)

    def divided(more: float) -> float:
        return max(max(loops) + more, (sum(loops) + more * len(loops)) / at_once)

    now = last_end(usual, at_once)
    return now / divided(BEFORE_AND_AFTER) - 1, now / divided(0) - 1
