"""Estimates the speed of a loop of asynchronous matmuls on an H100 from its machine code.

The model has 132 multiprocessors at 1.65 GHz. `sass` counts the cycles of matmuls. Four schedulers issue one
instruction a cycle each, and there are 16 exponentials a cycle. Instructions other than matmuls take `REST` of the sum
of the two. A matmul overlaps with exponentials that are issued before the wait for it, which saves `GAINED` of the
shorter of the two. Since programs begin, end, wait for memory and are unequal, they reach only `REACHED` of the
resulting speed.

The three factors were fitted to 14 measurements of attention on an H100. The error is 9 % in the median and 13 % at
most (tests/tools/test_aot.py). Expect larger errors for other kernels, and for kernels that add to memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from foundry_kernels._triton.devices import device_of
from foundry_kernels.tools.inspect.sass import Loop

MULTIPROCESSORS, HERTZ = device_of(90).multiprocessors, 1.65e9
EXPONENTIALS_A_CYCLE = 16
REST, GAINED, REACHED = 0.44, 0.68, 0.64


@dataclass(frozen=True)
class Estimate:
    """Cycles of one iteration of the loop, and the TFLOP/s of all its matmuls."""

    matmuls: float
    issue: float
    exponentials: float
    together: float
    tflops: float

    def __str__(self) -> str:
        return (
            f"estimate for an H100: {self.matmuls:.0f} cycles of matmuls, {self.issue:.0f} of issue, "
            f"{self.exponentials:.0f} of exponentials; {self.together:.0f} together, {self.tflops:.0f} TFLOP/s"
        )


def estimate(loop: Loop, warps: int) -> Estimate | None:
    """Estimates a loop of a program with `warps` warps; None for a loop without asynchronous matmuls."""
    if not loop.multiply_adds:
        return None
    groups = warps / 4
    issue = (loop.instructions - loop.skipped) * groups
    special = loop.counts.get("exponential", 0) + loop.counts.get("special", 0)
    exponentials = special * warps * 32 / EXPONENTIALS_A_CYCLE
    rest, matmuls = REST * (issue + exponentials), loop.matmul_cycles * groups
    hidden = rest * loop.hidden / max(loop.counts.get("exponential", 0), 1)
    together = matmuls + rest - GAINED * min(loop.overlapped_cycles * groups, hidden)
    tflops = REACHED * 2 * loop.multiply_adds * groups / together * MULTIPROCESSORS * HERTZ / 1e12
    return Estimate(matmuls, issue, exponentials, together, tflops)
