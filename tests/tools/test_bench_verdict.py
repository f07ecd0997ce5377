"""The benchmarks' verdict, which calls no ratio that noise hides. Times are made up: no time decides a test."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from benchmarks import noise, rows, suite, verdict
from foundry_kernels.testing import Arg, Case


def row(op: str = "rms_norm", over: dict[str, float] | None = None, **changes: Any) -> dict[str, Any]:
    made = {"kind": "op", "op": op, "row": "native", "direction": "forward", "dtype": "float32", "case": "2x4-cached"}
    made |= {"memory": "cold", "median_us": 3.0, "limit": "memcpy", "of_limit": 0.5, "GB/s": 7.0}
    return made | {"speedup_over": over or {}, "peak_bytes": 2_000_000} | changes


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_the_verdict_says_where_it_pays_and_where_not() -> None:
    rows = [
        row("rms_norm", {"eager": 5.0, "torch.compile": 1.5}),
        row("rms_norm", {"eager": 6.0, "torch.compile": 2.5}),
        row("rms_norm", {"eager": 4.0, "torch.compile": 0.8, "triton": 0.1}, case="1x4-decode", dtype="bfloat16"),
        row("rms_norm", {"native": 0.2}, row="eager"),
        row("rope", {"eager": 1.01}),
        row("swiglu", {"eager": 0.5}, direction="backward"),
        row("geglu", {}, wrong="max error 1"),
        row("transformer", {"reference": 1.33, "ours": 1.0}, kind="model", direction="step", case="small", row="ours"),
        row("generation", {"reference, compiled": 0.9}, kind="model", direction="decode", case="3m", row="ours"),
        {"kind": "scaling", "row": "native", "op": "rope"},
    ]
    assert verdict.lines(rows) == [
        "It pays here:",
        "  rms_norm forward: 1.50x torch.compile, 5.00x eager (median of 3 rows); behind on 1",
        "  transformer small, step: ours 1.33x reference",
        "No difference (within 5 %):",
        "  rope forward: 1.01x eager",
        "It does not pay here:",
        "  swiglu backward: 0.50x eager; behind on 1",
        "Wrong results, so without ratios: geglu forward native.",
        "3 of 7 benchmarks are slower than a peer.",
        "  0.50x eager: `swiglu`, backward, float32, 2x4, cold",
        "  0.80x torch.compile: `rms_norm`, forward, bfloat16, 1x4, decode, cold",
        "  0.90x reference, compiled: generation, ours, decode, float32, 3m, cold",
    ]
    assert verdict.lines([]) == []
    many = [row(f"op{i % 8}", {"eager": 0.5 + i / 100}, direction=("forward", "backward")[i % 2]) for i in range(30)]
    assert verdict.lines(many)[-1] == "  and 18 more"
    assert len(verdict.lines(many)) <= 30


# --- noise ------------------------------------------------------------------------------------------------------------


def drawn(rounds: int, spread: float, seconds: float = 1.0, seed: int = 0) -> list[float]:
    """Times that differ by about as much from round to round."""
    generator = random.Random(seed)
    return [seconds * math.exp(generator.gauss(0.0, spread)) for _ in range(rounds)]


def timed(peer: list[float], ours: list[float], **changes: Any) -> dict[str, Any]:
    """A row as `rows.Measured` makes it."""
    ratio = sorted(p / o for p, o in zip(peer, ours, strict=True))[len(ours) // 2]
    return row("rope", {"eager": round(ratio, 3)}, noise={"eager": noise.of_peer(peer, ours)}) | changes


STEADY = drawn(15, 0.01, seed=1)
QUIET, BEHIND = timed(drawn(15, 0.01, 1.2), STEADY), timed(drawn(15, 0.01, 0.8), STEADY, op="swiglu")
NOISY = timed(drawn(15, 0.5, 1.2), STEADY, op="geglu")
NOISY_BEHIND = timed(drawn(15, 0.5, 0.85, seed=7), STEADY, op="geglu")
ALTERNATING, DRIFTING = [1.0, 1.5] * 8, [1.0 + 0.02 * i for i in range(15)]


@pytest.mark.parametrize(
    ("made", "called"),
    [
        (QUIET, "faster"),
        (BEHIND, "slower"),
        (NOISY, "noisy"),
        (NOISY_BEHIND, "noisy"),
        (timed(drawn(15, 0.01), STEADY), "even"),
        (timed(drawn(15, 0.5, 9.0), STEADY), "faster"),  # far enough from 1, any noise allows it
        (timed(drawn(15, 0.01, 1.1), drawn(15, 0.6, seed=5)), "noisy"),  # ours is the noisy one
        (timed([0.9 * t for t in ALTERNATING], [1.0] * 16), "noisy"),  # though its spread of ratios is not
        (timed([1.2 * t for t in DRIFTING], DRIFTING), "faster"),  # a machine that slows down slows all alike
        (row(over={"eager": 0.9}), "slower"),  # results without noise
    ],
)
def test_what_a_ratio_is_called(made: dict[str, Any], called: str) -> None:
    assert noise.call(made, "eager") == called


@pytest.mark.parametrize("rounds", [3, 5, 6, 15])
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_the_same_code_is_rarely_called_faster_or_slower(rounds: int, spread: float) -> None:
    called, held = 0, 0
    for seed in range(300):
        peer, ours = drawn(rounds, spread, seed=2 * seed), drawn(rounds, spread, seed=2 * seed + 1)
        called += not noise.drowned(timed(peer, ours), "eager")
        held += noise.interval([p / o for p, o in zip(peer, ours, strict=True)])[0] <= 1
    assert called <= 0.05 * 300
    assert held >= 0.94 * 300  # one side of 95 %, from below


def test_rows_that_are_measured_keep_the_noise_of_each_peer() -> None:
    case = Case("8x64", {"x": Arg((8, 64)), "weight": Arg((64,))}, {"round_before_weight": True})
    group = suite.Group(fk.OPS["rms_norm"], case, torch.float32, "forward", "warm")
    measured = rows.Measured(group, (0.01, 5), (*group.ours, "eager", "F.rms_norm", "memcpy"))
    assert {len(times) for times in measured.times.values()} == {noise.LEAST}
    found = measured.row(group.ours[0])
    assert found["noise"].keys() == found["speedup_over"].keys() >= {"eager", "F.rms_norm"}
    for peer, known in found["noise"].items():
        assert known["low"] <= found["speedup_over"][peer] <= known["high"]
        assert known["itself"] >= 0
