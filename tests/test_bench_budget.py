"""What benchmarks leave out to keep their time and memory, what they say of a forced instruction set, and the verdict.
Estimates and clocks are made up: no time decides a test."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from benchmarks import budget, calls, estimates, isa, measure, models, report, suite, tables, verdict
from benchmarks.budget import Budget, Unit, collected, plan
from foundry_kernels import _native
from foundry_kernels.testing import Arg, Case

ROOT = Path(__file__).parents[1]


def unit(name: str, fixed: float = 10.0, rounds: float = 0.0, **changes: Any) -> Unit:
    return Unit(name, changes.pop("shape", name), changes.pop("kind", "operation"), fixed, rounds, **changes)


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_what_fits_is_measured_whole() -> None:
    found = plan([unit("a", 10, 20), unit("b", 10, 20)], 60)
    assert (found.effort, found.cut, found.seconds) == (1.0, (), 60)


def test_rounds_are_cut_before_shapes() -> None:
    units = [unit("a", 10, 20, size=2), unit("b", 10, 20, size=1)]
    assert plan(units, 59) == budget.Plan(0.5, (), 40)
    assert plan(units, 39) == budget.Plan(0.25, (), 30)
    assert plan(units, 29) == budget.Plan(0.25, ("a",), 15)


def test_the_largest_shapes_are_cut_first_and_whole() -> None:
    units = [
        unit("small forward", shape="small", size=1),
        unit("large forward", shape="large", size=5),
        unit("large backward", shape="large", size=9),
        unit("middle", size=7),
    ]
    assert plan(units, 35).cut == ("large",)
    assert plan(units, 15).cut == ("large", "middle")
    assert plan(units, 5).cut == ("large", "middle", "small")


def test_models_and_the_smallest_shape_of_an_operation_are_cut_last() -> None:
    rows = [
        unit("rope large", op="rope", size=8),
        unit("rope small", op="rope", size=3),
        unit("swiglu small", op="swiglu", size=1),
        unit("swiglu large", op="swiglu", size=2),
        unit("model", size=99, last=True),
    ]
    units = collected(rows)
    assert plan(units, 30).cut == ("rope large", "swiglu large")
    assert plan(units, 20).cut == ("rope large", "swiglu large", "model")


def test_rows_of_a_comparison_are_one_unit() -> None:
    [found] = collected([unit("a", 2, a_row=0.5)] * 3)
    assert found.rows == 3
    assert found.seconds() == 3.5


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(units: list[Unit], minutes: float, slower: float = 1.0) -> tuple[Budget, Clock]:
    """All units one after the other, each of which takes `slower` times what was expected."""
    clock = Clock()
    kept = Budget(units, minutes, started=100.0, clock=clock)
    for u in units:
        share = kept.admit(u.id)
        if share is not None:
            clock.now += u.seconds(share) * slower
            kept.spend(u.id, u.seconds(share) * slower)
    return kept, clock


def test_a_run_as_fast_as_expected_loses_nothing() -> None:
    kept, _ = run([unit(str(i), 20, 20) for i in range(10)], 8)
    assert set(kept.decided.values()) == {1.0}
    assert kept.kept() == {"minutes": 8, "spent": 6.7, "comparisons": 10, "cut": {}, "fewer_rounds": 0}


@pytest.mark.parametrize("slower", [0.5, 2.0, 3.0, 6.0])
def test_a_machine_that_is_slower_than_expected_keeps_the_time(slower: float) -> None:
    units = [unit(f"{i}", 3, 4, size=i % 7, shape=f"shape {i % 7}") for i in range(70)]
    kept, clock = run(units, 8, slower)
    assert clock.now - 100 <= 8 * 60
    measured = [i for i, share in enumerate(kept.decided.values()) if share is not None]
    assert len(measured) * 3 * slower > 0.5 * min(8 * 60, 70 * 3 * slower)  # and does not give up most of it either
    cut = [i for i in range(70) if i not in measured]
    assert not cut or min(i % 7 for i in cut) > 0 or slower == 6  # the smallest shape stays
    assert len(kept.decided) == 70


def test_what_was_to_be_cut_comes_back_on_a_faster_machine() -> None:
    units = [unit(f"{i}", 60, size=i) for i in range(16)]
    assert plan(units, 8 * 60).cut
    kept, clock = run(units, 8, slower=0.25)
    assert None not in kept.decided.values()
    assert clock.now - 100 <= 8 * 60


def test_estimates_of_one_kind_do_not_correct_another() -> None:
    kept, clock = Budget([unit("a", 100), unit("b", 100), unit("c", 100, kind="model")], 60, 0.0, Clock()), 0
    assert kept.admit("a") == 1.0
    kept.spend("a", 300)
    assert kept.factors["operation"] == pytest.approx(305 / 105)
    assert "model" not in kept.factors
    assert clock == 0


def test_without_a_budget_nothing_is_cut() -> None:
    kept, _ = run([unit(str(i), 1000, 1000) for i in range(10)], 0, slower=5)
    assert set(kept.decided.values()) == {1.0}
    assert tables.cuts(kept.kept()) == []
    assert "no budget" in kept.announced()[0]


def test_the_announcement_and_the_progress_say_what_is_left() -> None:
    clock = Clock()
    units = [unit("a", 60, 240, size=1, rows=3), unit("b", 360, 60, size=2, rows=4)]
    kept = Budget(units, 4, 100.0, clock)
    first, fewer, cut = kept.announced()
    assert first == "7 rows in 2 comparisons, about 2.0 min; budget 4 min (--budget, 0 for none)"
    assert "25%" in fewer
    assert cut.endswith(": b")
    assert kept.admit("a") == 0.25
    clock.now += 120
    kept.spend("a", 120)
    assert kept.admit("b") is None
    assert kept.progress() == "7 of 7 rows in 2.0 min, about 0.0 min to go, 2.0 min left of 4"
    assert kept.done == 1.0
    assert tables.cuts(kept.kept()) == [
        "Left out to keep 4 min: b (4 of 4 rows).",
        "Fewer rounds in 1 of 2 comparisons.",
    ]


# --- estimates and memory ---------------------------------------------------------------------------------------------


def group(rows: int, width: int = 64, **changes: Any) -> suite.Group:
    case = Case(f"{rows}x{width}", {"x": Arg((rows, width)), "weight": Arg((width,))}, {"round_before_weight": True})
    given = {"dtype": torch.float32, "direction": "forward", "memory": "warm"} | changes
    return suite.Group(fk.OPS["rms_norm"], case, **given)


def test_larger_calls_and_slower_machines_are_expected_to_take_longer() -> None:
    fast, slow = estimates.Machine(1e10, 1e11), estimates.Machine(1e9, 1e10)
    names = ("native", "eager", "torch.compile", "memcpy")

    def seconds(rows: int, machine: estimates.Machine, **changes: Any) -> float:
        return estimates.operation(group(rows, 4096, **changes), names, machine).seconds()

    assert seconds(64, fast) < seconds(8192, fast) < seconds(8192, slow)
    assert seconds(8192, fast) < seconds(8192, fast, direction="backward")
    small, large = (estimates.operation(group(n), names, fast) for n in (8, 80))
    assert small.size < large.size
    assert small.op == "rms_norm"
    assert small.kind == "compiled"
    assert estimates.operation(group(8), ("native", "memcpy"), fast).kind == "operation"


def test_every_row_of_the_suites_has_an_estimate() -> None:
    machine = estimates.Machine(1e10, 1e11)
    for g in suite.groups(False):
        assert 0 < estimates.operation(g, g.chosen(False), machine).seconds() < 600, g.id
    for m in models.model_groups(False):
        assert 0 < estimates.model(m, machine).seconds() < 600, m.id
    found = estimates.machine()
    assert found.copied > 0
    assert found.products > 0


def test_half_of_the_free_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    g = group(64, memory="cold")
    monkeypatch.setattr(suite, "cache_bytes", lambda device: 2**20)
    needed = suite.group_bytes(g)
    monkeypatch.setattr(suite, "free_bytes", lambda device: 2 * needed)
    assert suite.too_large(g) is None
    monkeypatch.setattr(suite, "free_bytes", lambda device: 2 * needed - 2)
    reason = suite.too_large(g)
    assert reason is not None
    assert "half is left to others" in reason
    assert set(calls.Contenders(g, ("eager", "memcpy")).why_not) == set(g.names)
    monkeypatch.setattr(suite, "free_bytes", lambda device: None)
    assert suite.too_large(g) is None


def test_what_a_group_needs_grows_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "cache_bytes", lambda device: 2**20)
    held = suite.case_bytes(group(4096).case, torch.float32)
    assert suite.group_bytes(group(4096)) > 3 * held  # x, y, and the float32 temporaries of eager
    assert suite.group_bytes(group(4096)) < suite.group_bytes(group(4096, direction="backward"))
    assert suite.group_bytes(group(4096)) < suite.group_bytes(group(4096, memory="cold"))


def test_contenders_share_their_results_memory_and_cotangents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "cache_bytes", lambda device: 100_000)
    monkeypatch.setattr(calls, "cache_bytes", lambda device: 100_000)
    made: list[torch.Tensor] = []
    real = calls.make_cotangents

    def counted(out: tuple[torch.Tensor, ...], layout: str) -> tuple[torch.Tensor, ...]:
        made.extend(found := real(out, layout))
        return found

    monkeypatch.setattr(calls, "make_cotangents", counted)
    found = calls.Contenders(group(64, direction="backward", memory="cold"), ("native", "eager", "F.rms_norm"))
    assert len(found.prepare) >= 2
    assert len(made) == 1


def test_the_latest_comparison_is_released_before_the_next_is_made() -> None:
    latest, alive = measure.Latest(), []

    class Held:
        def __init__(self) -> None:
            self.cycle = self  # as a traceback of a skipped row would hold it
            assert not alive
            alive.append(1)

        def __del__(self) -> None:
            alive.clear()

    first = id(latest.get("a", Held))
    assert id(latest.get("a", Held)) == first
    latest.get("b", Held)
    assert alive == [1]
    latest.clear()
    assert alive == []


# --- the instruction set ----------------------------------------------------------------------------------------------


def test_every_instruction_set_of_ours_holds_torch_too() -> None:
    assert set(_native.build_info().get("instruction_sets", [])) <= set(isa.SWITCHES)
    environment: dict[str, str] = {"ATEN_CPU_CAPABILITY": "avx512", "HOME": "/"}
    isa.switch("avx2", environment)
    assert environment == {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
        "HOME": "/",
    }
    with pytest.raises(ValueError, match=r"no instruction set 'avx1024'; there are baseline, avx2"):
        isa.switch("avx1024", environment)


HELD = isa.Isa("avx2", "AVX2", "avx2", obeyed=True, products16=False)


def test_a_row_says_what_it_was_held_to() -> None:
    assert HELD.row() == {"isa": "avx2", "torch_isa": "AVX2", "torch_obeyed": True}
    assert isa.Isa("avx512", "AVX512").row() == {}
    assert isa.Isa("avx512", "AVX512").kept() == {"ours": "avx512", "torch": "AVX512", "forced": None}


def test_the_page_says_once_what_was_held(monkeypatch: pytest.MonkeyPatch) -> None:
    text = tables.held({"isa": HELD.kept()})
    assert text.startswith("**Held to avx2** (`--isa avx2`)")
    assert "`ONEDNN_MAX_CPU_ISA=AVX2`" in text
    assert "torch reports AVX2" in text
    lied = isa.Isa("avx2", "AVX512", "avx2", obeyed=False)
    assert "**torch did not obey: it reports AVX512**" in tables.held({"isa": lied.kept()}).replace("\n", " ")
    assert tables.held({"isa": isa.Isa("avx2", "AVX2").kept()}) == tables.held({}) == ""
    run = {"machine_info": {"cpu": {"brand_raw": "A processor", "count": 2}}, "device": "cpu"}
    assert report.device(run) == "A processor, 2 cores"
    assert report.device({**run, "isa": HELD.kept()}) == "A processor, 2 cores, held to avx2"


def test_torch_is_no_peer_where_its_products_fall_back_to_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HELD.lacks_products(2, True)
    assert not HELD.lacks_products(4, True)
    assert not HELD.lacks_products(2, False)
    assert not isa.Isa("avx2", "AVX2").lacks_products(2, True)  # not forced: the machine is what it is
    case = Case("T=8", {n: Arg((1, 2, 8, 16)) for n in "qkv"}, {"causal": True})
    g = suite.Group(fk.OPS["flash_attention"], case, torch.bfloat16, "forward", "warm")
    monkeypatch.setattr(isa, "current", HELD)
    seconds = iter([9.0, 1.0, 2.0, 1.0])  # in bfloat16 and in float32, of eager and then of SDPA
    monkeypatch.setattr(calls, "_seconds", lambda prepare: next(seconds))
    found = calls.Contenders(g, (*g.ours, "eager", "SDPA flash", "memcpy"))
    assert "oneDNN is held to avx2: 9 times as slow as in float32" in found.why_not.pop("eager")
    assert found.why_not == {}
    assert set(found.prepare) == {*g.ours, "SDPA flash", "memcpy"}


def test_models_in_16_bits_are_not_measured_on_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "current", HELD)
    if suite.DEVICE != "cpu":
        pytest.skip("on a GPU the CPU's instruction set matters to no model")
    m = models.ModelGroup("transformer", "small", "forward", torch.bfloat16)
    found = models.ModelContenders(m, ("reference", "ours"))
    assert all("plain loops" in reason for reason in found.why_not.values())
    assert found.prepare == {}


# --- the verdict ------------------------------------------------------------------------------------------------------


def row(op: str, over: dict[str, float], **changes: Any) -> dict[str, Any]:
    known = {"op": op, "row": "native", "direction": "forward", "dtype": "float32", "case": "2x4-cached"}
    return known | {"memory": "cold", "speedup_over": over} | changes


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
        "Behind a peer, 2 of 5 rows:",
        "  swiglu backward float32 2x4, cold: 0.50x eager",
        "  rms_norm forward bfloat16 1x4, decode, cold: 0.80x torch.compile",
        "Wrong results, so without ratios: geglu forward native.",
    ]


def test_a_verdict_fits_a_screen_and_may_have_nothing_to_say() -> None:
    many = [row(f"op{i % 8}", {"eager": 0.5 + i / 100}, direction=("forward", "backward")[i % 2]) for i in range(30)]
    found = verdict.lines(many)
    assert found[-1] == "  and 22 more"
    assert len(found) <= 30
    assert verdict.lines([]) == []
    assert verdict.lines([row("rope", {"eager": 2.0})])[-1] == "Behind a peer: none of 1 rows."


# --- the command ------------------------------------------------------------------------------------------------------


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}
    call = [sys.executable, "-m", "pytest", "benchmarks", "--benchmark-only", *arguments]
    return subprocess.run(call, cwd=ROOT, env=env, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget=-1",), "argument --budget: invalid minutes value: '-1'"),
        (("--budget=nan",), "argument --budget: invalid minutes value: 'nan'"),
        (("--isa=avx1024",), "argument --isa: invalid choice: 'avx1024'"),
    ],
)
def test_options_that_make_no_sense_are_refused_by_name(arguments: tuple[str, ...], message: str) -> None:
    done = command(*arguments)
    assert done.returncode == 4
    assert message in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="--isa is the CPU's")
def test_a_forced_run_and_one_without_time(tmp_path: Path) -> None:
    """It announces a plan, says its verdict before the tables, and what it was held to; in no time, all is left out."""
    usable = _native.build_info().get("usable_instruction_sets", [])
    if "avx2" not in usable:
        pytest.skip("our kernels have no AVX2 here")
    run_file = tmp_path / "run.json"
    choice = "rms_norm and overhead and not add and not stubbed and not compile"
    done = command("--isa=avx2", "-k", choice, f"--benchmark-json={run_file}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"rows in \d comparisons, about \d\.\d min; budget 8 min", done.stdout)
    assert "verdict: " in done.stdout
    assert done.stdout.index("verdict: ") < done.stdout.index("Name (time in")
    run = json.loads(run_file.read_text())
    assert run["isa"]["forced"] == run["isa"]["ours"] == "avx2"
    assert run["isa"]["obeyed"]
    for found in run["benchmarks"]:
        assert found["extra_info"]["isa"] == "avx2"
        assert found["extra_info"]["torch_isa"] == "AVX2"
        assert found["extra_info"]["torch_obeyed"] is True
    assert run["budget"]["cut"] == {}
    kept = tmp_path / "kept.json"
    report.keep(run_file, kept)
    assert "**Held to avx2**" in report.page(kept).read_text()

    nothing = command("--budget=0.01", "-k", choice, "-rs")
    assert "budget: no time for it within 0.01 min" in nothing.stdout
    assert " passed" not in nothing.stdout
