"""An estimate of the cost of attention's CUDA C++ loops relative to FlashAttention-2's, from machine code. No GPU ran
them.

The model of the cycles of one `mma.sync` of 16x8x16 on a quadrant of a multiprocessor is

    tensor + SHARE (issue + 16 loads)

where `tensor` are the cycles of its tensor core, from data sheets, `issue` is the number of instructions, and `loads`
the number of loads from shared memory, mostly ldmatrix, each of which takes 16 cycles. SHARE is the fraction that does
not overlap with matmuls. It is the only fitted number, from published speeds of FlashAttention-2, whose machine code
was counted in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Loop:
    """The matmuls per score, and for each `mma` the number of instructions and of loads from shared memory."""

    products: int
    issue: float
    loads: float


#: Cycles of a `mma.sync` of 16x8x16, with sums in float32.
TENSOR = {"A100": 8, "RTX 3090": 32, "RTX 4090": 32, "RTX 5090": 32}

#: FlashAttention-2 with heads of 128, by chip and direction: its loop, and the published share of the chip's peak.
PEER = {
    ("A100", "forward"): (Loop(2, 3.54, 0.31), 0.73),
    ("A100", "backward"): (Loop(5, 2.78, 0.45), 0.63),
    ("RTX 3090", "forward"): (Loop(2, 4.07, 0.38), 0.95),
    ("RTX 4090", "forward"): (Loop(2, 4.07, 0.38), None),
    ("RTX 4090", "backward"): (Loop(5, 3.26, 0.45), None),
    ("RTX 5090", "forward"): (Loop(2, 4.07, 0.38), 0.91),
    ("RTX 5090", "backward"): (Loop(5, 3.26, 0.45), None),
}


def cycles(chip: str, loops: list[Loop], share: float) -> float:
    """The cycles of all matmuls of a score."""
    return sum(x.products * (TENSOR[chip] + share * (x.issue + 16 * x.loads)) for x in loops)


def of_peak(chip: str, loops: list[Loop], needed: int, share: float) -> float:
    """The share of the chip's peak, for the `needed` matmuls: 2 forward, 5 backward."""
    return needed * TENSOR[chip] / cycles(chip, loops, share)


def fitted() -> tuple[float, dict[tuple[str, str], float]]:
    """The SHARE with the smallest maximum relative error, and the error (estimate / published - 1) for each published
    figure."""

    def errors(share: float) -> dict[tuple[str, str], float]:
        return {
            key: of_peak(key[0], [loop], loop.products, share) / published - 1
            for key, (loop, published) in PEER.items()
            if published is not None
        }

    best = min((n / 1000 for n in range(1, 1000)), key=lambda share: max(map(abs, errors(share).values())))
    return best, errors(best)


def report(ours: dict[tuple[str, str], list[Loop]]) -> list[str]:
    """A line for each chip and direction that both have. `ours` is by architecture, such as "80", and direction."""
    share, errors = fitted()
    worst = max(map(abs, errors.values()))
    lines = [f"an estimate, fitted on {len(errors)} published figures, with errors of up to {worst:.0%}:"]
    for (chip, direction), (peer, published) in PEER.items():
        theirs = of_peak(chip, [peer], peer.products, share)
        arch = "80" if chip == "A100" else "89"
        for (of_arch, what), loops in ours.items():
            if of_arch == arch and what.startswith(direction):
                own = of_peak(chip, loops, peer.products, share)
                said = "" if published is None else f" (published: {published:.0%})"
                lines.append(
                    f"  {chip}, {what}: {own:.0%} of the peak, FlashAttention-2 {theirs:.0%}{said}, {own / theirs:.2f}x"
                )
    return lines
