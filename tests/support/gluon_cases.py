"""Calls for the Gluon forward of attention, and the comparison of its results with the reference."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foundry_kernels.testing import Arg, Case, Expected, compare, normal


def case(b: int, heads: tuple[int, int], tokens: tuple[int, int], d: int = 64, layout: str = "contiguous",
         std: float = 1.0, **options: Any) -> Case:  # fmt: skip
    (h, hk), (t, s) = heads, tokens
    q, k = Arg((b, h, t, d), layout, normal(std)), Arg((b, hk, s, d), layout, normal(std))
    name = f"B={b} H={h} Hk={hk} T={t} S={s} D={d}"
    return Case(name, {"q": q, "k": k, "v": Arg((b, hk, s, d), layout)}, {"return_lse": True, **options})


def hold(expected: Expected, results: tuple[Tensor, ...]) -> None:
    """Compares out and lse with the reference's."""
    for i, (a, r, o) in enumerate(zip(results, expected.reference.outputs, expected.oracle.outputs, strict=True)):
        compare(f"output {i}", a, r, o, float(expected.scales.get(f"output {i}", 0.0)))
