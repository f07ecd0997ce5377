"""The benchmarks' verdict, which calls no ratio that noise hides. Times are made up: no time decides a test."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from bench_rows import kept, row

import foundry_kernels as fk
from benchmarks import noise, rows, suite, tables, verdict
from foundry_kernels.ops.flash_attention import bench_masked
from foundry_kernels.ops.lora_linear import bench as lora_linear
from foundry_kernels.testing import Arg, Case

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


def test_calls_without_the_option_and_our_own_kernels_are_no_peers() -> None:
    assert (bench_masked.PLAIN,) == lora_linear.UNCHECKED == (tables.WITHOUT,)
    rows = [
        row("flash_attention", {tables.WITHOUT: 0.8, "eager": 4.0, "reference": 0.1}, case="2x4-bias"),
        row("geglu", kind="overhead", host_us=4.0),
        row("geglu", kind="overhead", host_us=3.0, row="eager"),
        row("geglu", kind="overhead", host_us=9.0, row="reference"),
        row("rope", kind="overhead", host_us=4.0, row="triton, both, launch stubbed"),
        row("rope", kind="overhead", host_us=1.0, row="Liger, both, launch stubbed"),
    ]
    found, held = verdict.slower(kept(*rows))
    assert [(s.ratio, s.peer, s.what) for s in found] == [
        (0.25, "Liger", "host time of `rope`"),
        (0.75, "eager", "host time of `geglu`"),
    ]
    assert verdict.counted(found, held) == "2 of 3 benchmarks are slower than a peer."
    assert verdict.counted([], 3) == "None of 3 benchmarks is slower than a peer."


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


def test_few_rounds() -> None:
    assert noise.of_peer([1.0], [2.0]) == {}
    assert noise.against_itself([1.0, 2.0]) is None
    assert noise.interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == (1.0, 6.0)
    assert noise.interval([float(n) for n in range(1, 16)]) == (4.0, 12.0)
    spoiled = [1e-3, *(3.0 + n / 10 for n in range(noise.LEAST - 1))]
    assert noise.interval(spoiled)[0] == 3.0


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


def test_noisy_rows_are_named_and_not_called_slower() -> None:
    found = verdict.lines([QUIET, NOISY, NOISY_BEHIND, BEHIND], ["Left out: much."])
    shown = "\n".join(found)
    assert "It pays here:\n  rope forward: 1.2" in shown
    assert "Too noisy to call:\n  geglu forward: " in shown
    assert "Left out: much.\nA peer against itself: ±" in shown
    assert "(eager beside geglu forward)." in shown
    assert "Rows too noisy to call:\n  0.96x eager ±39%: `geglu`, forward, float32, 2x4, cold\n" in shown
    assert found[-2] == "1 of 4 benchmarks is slower than a peer, 1 too noisy to call."
    assert found[-1] == "  0.80x eager ±1.0%: `swiglu`, forward, float32, 2x4, cold"
    of = kept(QUIET, NOISY_BEHIND, BEHIND)
    table = verdict.slower_table(of)
    assert "peer against itself |" in table
    assert table.index("`swiglu`") < table.index("Too noisy to call") < table.index("`geglu`")
    assert f"| ≈ {NOISY_BEHIND['speedup_over']['eager']:.2f} |" in tables.operations(of)
    assert tables.operations(of).count("≈") == 1
    assert "marked ≈: too noisy to call." in tables.header(of, "a.json").replace("\n", " ")


def test_host_times_add_the_noise_of_both() -> None:
    def host(name: str, us: float, itself: float) -> dict[str, Any]:
        return row("rope", kind="overhead", row=name, host_us=us, itself=itself)

    of = kept(host("native", 1.1, 0.01), host("eager", 1.0, 0.2))
    assert verdict.slower(of) == ([], 1)
    assert [s.what for s in verdict.too_noisy(of)] == ["host time of `rope`"]
    of = kept(host("native", 1.1, 0.01), host("eager", 1.0, 0.02))
    assert [round(s.ratio, 2) for s in verdict.slower(of)[0]] == [0.91]
