"""Ratios that noise hides are not called: in the verdict, on the pages, in README.md. Times are made up or drawn: no
time decides a test."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from benchmarks import noise, readme, report, rows, suite, tables, verdict
from foundry_kernels.testing import Arg, Case


def drawn(rounds: int, spread: float, seconds: float = 1.0, seed: int = 0) -> list[float]:
    """Times that differ by about as much from round to round."""
    generator = random.Random(seed)
    return [seconds * math.exp(generator.gauss(0.0, spread)) for _ in range(rounds)]


def row(peer: list[float], ours: list[float], **changes: Any) -> dict[str, Any]:
    """As `rows.Measured` makes it."""
    ratio = sorted(p / o for p, o in zip(peer, ours, strict=True))[len(ours) // 2]
    known = {"op": "rope", "row": "native", "direction": "forward", "dtype": "float32", "case": "2x4-cached"}
    known |= {"memory": "cold", "median_us": 1.0, "limit": "memcpy", "peak_bytes": 1}
    found = {"speedup_over": {"eager": round(ratio, 3)}, "noise": {"eager": noise.of_peer(peer, ours)}}
    return known | found | changes


QUIET = row(drawn(15, 0.01, 1.2), drawn(15, 0.01, seed=1))
QUIET_BEHIND = row(drawn(15, 0.01, 0.8), drawn(15, 0.01, seed=1), op="swiglu")
NOISY = row(drawn(15, 0.5, 1.2), drawn(15, 0.01, seed=1), op="geglu")
NOISY_BEHIND = row(drawn(15, 0.5, 0.85, seed=7), drawn(15, 0.01, seed=1), op="geglu")
OLD = {k: v for k, v in row([0.9] * 6, [1.0] * 6).items() if k != "noise"}


def test_a_quiet_peer_is_called_and_a_noisy_one_is_refused() -> None:
    assert noise.call(QUIET, "eager") == "faster"
    assert noise.call(QUIET_BEHIND, "eager") == "slower"
    assert noise.call(NOISY, "eager") == "noisy"
    assert noise.call(NOISY_BEHIND, "eager") == "noisy"
    assert noise.call(row(drawn(15, 0.01), drawn(15, 0.01, seed=1)), "eager") == "even"
    # Far enough from 1, any noise allows it.
    assert noise.call(row(drawn(15, 0.5, 9.0), drawn(15, 0.01, seed=1)), "eager") == "faster"


def test_ours_may_be_the_noisy_one() -> None:
    quiet_peer = row(drawn(15, 0.01, 1.1), drawn(15, 0.6, seed=5))
    assert noise.itself(quiet_peer, "eager") < 0.02  # type: ignore[operator]
    assert noise.call(quiet_peer, "eager") == "noisy"


def test_a_peer_that_alternates_is_noisy_though_its_spread_of_ratios_is_not() -> None:
    """Odd rounds take half as long again: it is slower in these and faster in the others."""
    peer = [1.0, 1.5] * 8
    assert noise.against_itself(peer) == pytest.approx(0.5)
    assert noise.call(row([0.9 * t for t in peer], [1.0] * 16), "eager") == "noisy"


def test_a_machine_that_slows_down_slows_all_alike() -> None:
    """Neighbouring rounds are compared, so a drift is no noise."""
    slower = [1.0 + 0.02 * i for i in range(15)]
    found = row([1.2 * s for s in slower], slower)
    assert noise.itself(found, "eager") < 0.05  # type: ignore[operator]
    assert noise.call(found, "eager") == "faster"


@pytest.mark.parametrize("rounds", [3, 5, 6, 8, 15, 25])
@pytest.mark.parametrize("spread", [0.02, 0.3])
def test_the_same_code_is_rarely_called_faster_or_slower(rounds: int, spread: float) -> None:
    called, held = 0, 0
    for seed in range(500):
        peer, ours = drawn(rounds, spread, seed=2 * seed), drawn(rounds, spread, seed=2 * seed + 1)
        called += not noise.drowned(row(peer, ours), "eager")
        held += noise.interval([p / o for p, o in zip(peer, ours, strict=True)])[0] <= 1
    assert called <= 0.05 * 500
    assert held >= 0.94 * 500  # one side of 95 %, from below


def test_too_few_rounds_say_nothing() -> None:
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


# --- what is said of it -----------------------------------------------------------------------------------------------


def test_the_verdict_refuses_what_is_too_noisy_and_ends_with_what_is_slower() -> None:
    found = verdict.lines([QUIET, NOISY, NOISY_BEHIND, QUIET_BEHIND], ["Left out: much."])
    shown = "\n".join(found)
    assert "It pays here:\n  rope forward: 1.2" in shown
    assert "Too noisy to call:\n  geglu forward: " in shown
    assert "Left out: much.\nA peer against itself: ±" in shown
    assert "(eager beside geglu forward)." in shown
    assert "Rows too noisy to call:\n  0.96x eager ±39%: `geglu`, forward, float32, 2x4, cold\n" in shown
    assert found[-2] == "1 of 4 benchmarks is slower than a peer, 1 too noisy to call."
    assert found[-1] == "  0.80x eager ±1.0%: `swiglu`, forward, float32, 2x4, cold"


def kept(*of: dict[str, Any]) -> dict[str, Any]:
    return {"date": "2026-01-02", "device": "A", "environment": {"torch": "2"}, "rows": list(of)}


def test_pages_mark_it_and_do_not_list_it_as_slower(tmp_path: Path) -> None:
    assert NOISY_BEHIND["speedup_over"]["eager"] < 1
    of = kept(QUIET, NOISY_BEHIND, QUIET_BEHIND)
    found, held = verdict.slower(of)
    assert [s.what for s in found] == ["`swiglu`"]
    assert [s.what for s in verdict.too_noisy(of)] == ["`geglu`"]
    assert verdict.counted(found, held, verdict.too_noisy(of)) == (
        "1 of 3 benchmarks is slower than a peer, 1 too noisy to call."
    )
    table = verdict.slower_table(of)
    assert "peer against itself |" in table
    assert table.index("`swiglu`") < table.index("Too noisy to call") < table.index("`geglu`")
    assert f"| ≈ {NOISY_BEHIND['speedup_over']['eager']:.2f} |" in tables.operations(of)
    assert tables.operations(of).count("≈") == 1
    assert "marked ≈: too noisy to call." in tables.header(of, "a.json").replace("\n", " ")
    assert "1 too noisy to call" in readme._behind(tmp_path / "a.json", of, whole=True).replace("\n  ", " ")


def test_results_without_noise_are_what_they_were() -> None:
    assert noise.call(OLD, "eager") == "slower"
    assert noise.itself(OLD, "eager") is None
    assert verdict.slower_table(kept(OLD)).startswith("1 of 1 benchmarks is slower than a peer. Runs of")
    assert "against itself" not in verdict.slower_table(kept(OLD)) + tables.header(kept(OLD), "a.json")
    assert noise.in_short([OLD], ("native",)) == ""
    even = OLD | {"speedup_over": {"eager": 1.0}}
    assert noise.call(even, "eager") == "even"


def test_the_headline_calls_no_step_that_is_too_noisy(tmp_path: Path) -> None:
    step = row(
        drawn(15, 0.5, 1.1), drawn(15, 0.01, seed=1), kind="model", op="transformer", row="ours", direction="step"
    )
    step |= {"speedup_over": {"reference": 1.1}, "noise": {"reference": step["noise"]["eager"]}, "tokens/s": 1.0}
    base = step | {"row": "reference", "speedup_over": {}}
    text = readme._headline(tmp_path, kept(step, base), tmp_path / "a.json").replace("\n", " ")
    assert "runs too noisily to call it faster or slower (1.10x) in **1.00x** the memory" in text


def test_host_times_add_the_noise_of_both() -> None:
    def host(name: str, us: float, itself: float) -> dict[str, Any]:
        return row(
            [1.0] * 3, [1.0] * 3, kind="overhead", row=name, host_us=us, itself=itself, speedup_over={}, noise={}
        )

    of = kept(host("native", 1.1, 0.01), host("eager", 1.0, 0.2))
    assert verdict.slower(of) == ([], 1)
    assert [s.what for s in verdict.too_noisy(of)] == ["host time of `rope`"]
    of = kept(host("native", 1.1, 0.01), host("eager", 1.0, 0.02))
    assert [round(s.ratio, 2) for s in verdict.slower(of)[0]] == [0.91]


def test_rows_of_an_operation_are_kept_together(tmp_path: Path) -> None:
    """A run measures first what it needs most."""
    source, target = tmp_path / "run.json", tmp_path / "kept.json"
    order = [QUIET, QUIET_BEHIND, QUIET | {"case": "4x4-large"}]
    run = {"benchmarks": [{"extra_info": r} for r in order], "machine_info": {}, "datetime": "2026-01-02T"}
    source.write_text(json.dumps(run | {"environment": {"torch": "2"}, "device": "cpu"}))
    report.keep(source, target)
    assert [(r["op"], r["case"]) for r in report.load(target)["rows"]] == [
        ("rope", "2x4-cached"),
        ("rope", "4x4-large"),
        ("swiglu", "2x4-cached"),
    ]
