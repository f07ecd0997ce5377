"""How fast a loop of asynchronous products would run on an H100, by its machine code: an estimate that no GPU has made.

A multiprocessor at 1.65 GHz, of 132: products as `sass` counts their cycles, one instruction a cycle from each of four
schedulers, 16 exponentials a cycle. What is not a product takes 0.88 of the cycles of both together. Products that
exponentials follow before the wait for them overlap the part of the rest that those exponentials are a part of; of the
shorter of both 0.64 is gained. The factors were fitted to published results, which docs/dev/performance.md names, so
expect an error of 12 % at least. Not counted: other programs on the multiprocessor, which hide some more, what comes
before and after the loop, that programs are unequal, and memory.
"""

from __future__ import annotations

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
