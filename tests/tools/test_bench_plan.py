"""What a run of the benchmarks leaves out for its time, its memory and its instruction set. Clocks are made up."""

from __future__ import annotations

import os
import types
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch

import foundry_kernels as fk
from benchmarks import budget, calls, isa, measure, models, suite, tables, test_ops
from benchmarks.budget import Budget, Unit, collected
from foundry_kernels.core import extension
from foundry_kernels.testing import Arg, Case

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def ten_seconds_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in budget.ROW_SECONDS:
        monkeypatch.setitem(budget.ROW_SECONDS, kind, 10.0)


def unit(name: str, **changes: Any) -> Unit:
    return Unit(name, changes.pop("shape", name), changes.pop("kind", "memcpy"), **changes)


# --- time -------------------------------------------------------------------------------------------------------------


def test_the_order_of_a_run() -> None:
    """First the smallest shape of each operation, then models, then the rest by size, those of a shape together."""
    rows = [
        unit("model", size=99, place=budget.LATER),
        unit("rope large", shape="large", op="rope", size=8),
        unit("rope small", op="rope", size=3),
        unit("rope large again", shape="large", op="rope", size=9),
        unit("swiglu large", op="swiglu", size=2),
        unit("swiglu small", op="swiglu", size=1),
        unit("growth", size=1),
    ]
    order = ("rope small", "swiglu small", "model", "growth", "swiglu large", "rope large", "rope large again")
    assert [u.id for u in budget.ordered(collected(rows))] == [*order]
    [found] = collected([unit("a")] * 3)
    assert (found.rows, found.seconds(), found.seconds(0.5)) == (3, 30, 22.5)


def test_the_shapes_that_are_needed_have_every_direction_and_dtype() -> None:
    """The smallest shape has no backward pass: the next one has everything, and is the one that is needed."""
    both = ("forward float32", "forward bfloat16", "backward float32", "backward bfloat16")
    rows = [unit(f"decode {what}", shape="decode", op="rope", what=what, size=1) for what in both[:2]]
    rows += [
        unit(f"{s} {what}", shape=s, op="rope", what=what, size=n)
        for n, s in ((5, "large"), (3, "cached"))
        for what in both
    ]
    needed: list[set[str]] = []
    for missing in ("", "cached forward float32", "large backward float32"):
        rows = [r for r in rows if r.id != missing]
        needed.append({u.shape for u in collected(rows) if u.place == budget.NEEDED})
    assert needed == [{"cached"}, {"large"}, {"cached", "decode"}]


@pytest.mark.skipif(suite.DEVICE != "cpu", reason="the quick set of a CPU")
def test_every_operation_direction_and_dtype_is_needed_of_the_quick_set() -> None:
    units = collected([test_ops.unit({"group": g}) for g in suite.groups(False)])
    assert {(u.op, u.what) for u in units if u.place == budget.NEEDED} == {(u.op, u.what) for u in units}
    assert sum(u.place == budget.NEEDED for u in units) < len(units) / 2
    assert {u.kind for u in units} == {"memcpy", "GEMM"}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def run(units: list[Unit], minutes: float, slower: float = 1.0) -> tuple[Budget, float]:
    """All units one after the other, each of which takes `slower` times what was expected; the seconds of the run."""
    clock = Clock()
    kept = Budget(units, minutes, started=100.0, clock=clock)
    for u in units:
        share = kept.admit(u.id)
        if share is not None:
            clock.now += u.seconds(share) * slower
            kept.spend(u.id, u.seconds(share) * slower)
    return kept, clock.now - 100


def test_what_fits_is_measured_whole_and_rounds_are_cut_before_comparisons() -> None:
    units = [unit(str(i), rows=4) for i in range(10)]
    kept, _ = run(units, 8)
    assert set(kept.decided.values()) == {1.0}
    assert kept.kept() == {"minutes": 8, "spent": 6.7, "comparisons": 10, "cut": {}, "fewer_rounds": 0}
    assert None not in run(units, 6)[0].decided.values()
    assert 0.5 in run(units, 6)[0].decided.values()
    assert [*run(units, 4)[0].decided.values()][-2:] == [None, None]
    kept, _ = run(units, 0, slower=5)
    assert set(kept.decided.values()) == {1.0}
    assert tables.cuts(kept.kept()) == []
    assert "no budget" in kept.announced()


@pytest.mark.parametrize("slower", [0.25, 0.5, 2.0, 3.0, 6.0])
def test_a_machine_of_another_speed_keeps_the_time(slower: float) -> None:
    units = [unit(f"{i}", size=i % 7, shape=f"shape {i % 7}") for i in range(70)]
    kept, seconds = run(units, 8, slower)
    assert seconds <= 8 * 60
    assert len(kept.decided) == 70
    measured = sum(share is not None for share in kept.decided.values())
    assert measured * 7.5 * slower > 0.5 * min(8 * 60, 70 * 7.5 * slower)  # and does not give up most of it either
    assert (measured == 70) == (slower < 1)


def test_what_one_kind_takes_says_nothing_of_another() -> None:
    kept = Budget([unit("a", rows=10), unit("b"), unit("c", kind="model")], 60, 0.0, Clock())
    assert kept.admit("a") == 1.0
    kept.spend("a", 300)
    assert kept.rates["memcpy"] == pytest.approx(320 / 12)
    assert kept.rates["model"] == 10


def test_a_run_says_what_is_left_out() -> None:
    clock = Clock()
    units = [unit("a", size=1, rows=12, op="rope"), unit("b", size=2, rows=14, op="swiglu")]
    kept = Budget(units, 2, 100.0, clock)
    assert kept.announced() == "26 rows in 2 comparisons, about 4.3 min for all; budget 2 min (--budget, 0 for none)"
    assert kept.admit("a") == 0.5
    clock.now += 90
    kept.spend("a", 90)
    assert kept.admit("b") is None
    assert kept.progress() == "1.5 min: 12 of 26 rows"
    assert tables.cuts(kept.kept()) == [
        "Left out to keep 2 min: b (14 of 14 rows).",
        "Fewer rounds in 1 of 2 comparisons.",
        "No row of swiglu: this machine was too slow, or too busy.",
    ]
    many = kept.kept() | {"fewer_rounds": 0, "none_of": [], "cut": {f"shape {i}": [1, 2] for i in range(9)}}
    assert tables.cuts(many, most=2) == [
        "Left out to keep 2 min: shape 0 (1 of 2 rows); shape 1 (1 of 2 rows); and 7 more."
    ]
    assert "shape 8 (1 of 2 rows)" in tables.cut({"budget": many}).replace("\n", " ")


# --- memory -----------------------------------------------------------------------------------------------------------


def group(rows: int, width: int = 64, **changes: Any) -> suite.Group:
    case = Case(f"{rows}x{width}", {"x": Arg((rows, width)), "weight": Arg((width,))}, {"round_before_weight": True})
    given = {"dtype": torch.float32, "direction": "forward", "memory": "warm"} | changes
    return suite.Group(fk.OPS["rms_norm"], case, **given)


def test_half_of_the_free_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    g = group(64, memory="cold")
    monkeypatch.setattr(suite, "cache_bytes", lambda device: 2**20)
    needed = suite.group_bytes(g)
    monkeypatch.setattr(suite, "free_bytes", lambda device: 2 * needed)
    assert suite.too_large(g) is None
    monkeypatch.setattr(suite, "free_bytes", lambda device: 2 * needed - 2)
    assert "half is left to others" in str(suite.too_large(g))
    assert set(calls.Contenders(g, ("eager", "memcpy")).why_not) == set(g.names)
    monkeypatch.setattr(suite, "free_bytes", lambda device: None)
    assert suite.too_large(g) is None
    held = suite.case_bytes(group(4096).case, torch.float32)
    assert suite.group_bytes(group(4096)) > 3 * held  # x, y, and the float32 temporaries of eager
    assert suite.group_bytes(group(4096)) < suite.group_bytes(group(4096, direction="backward"))
    assert suite.group_bytes(group(4096)) < suite.group_bytes(group(4096, memory="cold"))


def test_contenders_share_their_cotangents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "cache_bytes", lambda device: 100_000)
    monkeypatch.setattr(calls, "cache_bytes", lambda device: 100_000)
    made: list[torch.Tensor] = []
    real = calls.make_cotangents

    def counted(out: tuple[torch.Tensor, ...], layout: str, drawn_on: str) -> tuple[torch.Tensor, ...]:
        made.extend(found := real(out, layout, drawn_on=drawn_on))
        return found

    monkeypatch.setattr(calls, "make_cotangents", counted)
    found = calls.Contenders(group(64, direction="backward", memory="cold"), ("native", "eager", "F.rms_norm"))
    assert len(found.prepare) >= 2
    assert len(made) == 1


def test_contenders_settle_and_runs_with_new_pages_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, ran = iter([0, 90, 90, 90, 90, 90]), []
    usage = lambda who: types.SimpleNamespace(ru_minflt=next(faults))  # noqa: E731
    with monkeypatch.context() as patch:
        patch.setattr(measure.resource, "getrusage", usage)
        measure.settle({n: (lambda n=n: lambda: ran.append(n)) for n in "ab"}, 8)
        assert "".join(ran) == "ababab"  # one turn with page faults, two without
        ran.clear()
        faults = iter(range(0, 1000, 50))
        measure.settle({"a": lambda: lambda: ran.append("a")}, 4)
        assert len(ran) == 4
    pages, runs = [0], [0]
    monkeypatch.setattr(measure, "new_pages", lambda: pages[0])

    def run() -> None:
        runs[0] += 1
        pages[0] += runs[0] <= 2  # the first two bring one each

    for again, expected in ((3, 3), (1, 2), (0, 1)):
        runs[0] = 0
        times = measure.interleaved({"a": lambda: run}, 0.0, 1, warm_ups=0, least=1, first=0, again=again)
        assert (len(times["a"]), runs[0]) == (1, expected)


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


# --- the instruction set, and the command -----------------------------------------------------------------------------


def test_every_instruction_set_of_ours_holds_torch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(extension.build_info().get("instruction_sets", [])) <= set(isa.SWITCHES)
    environment: dict[str, str] = {"ATEN_CPU_CAPABILITY": "avx512", "HOME": "/"}
    isa.switch("avx2", environment)
    assert environment == isa.SWITCHES["avx2"] | {"HOME": "/"}
    assert set(isa.SWITCHES["avx2"].values()) == {"avx2", "AVX2", "x86-64-v3"}
    with pytest.raises(ValueError, match=r"no instruction set 'avx1024'; there are baseline, avx2"):
        isa.switch("avx1024", environment)
    monkeypatch.setattr(isa, "switch", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(extension, "MISSING", None)
    monkeypatch.setattr(extension, "build_info", lambda: {"usable_instruction_sets": ["baseline", "avx2"]})
    with pytest.raises(ValueError, match="our kernels have no 'avx512' here; they have baseline, avx2"):
        isa.force("avx512")
    monkeypatch.setattr(extension, "MISSING", "the C++ extension is not built")
    with pytest.raises(ValueError, match="cannot be restricted to 'avx2': the C\\+\\+ extension is not built"):
        isa.force("avx2")


HELD = isa.Isa("avx2", "AVX2", "avx2", obeyed=True, products16=False)


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
    assert "oneDNN is restricted to avx2: more than 2.5 times as slow as in float32" in found.why_not.pop("eager")
    assert found.why_not == {}
    assert set(found.prepare) == {*g.ours, "SDPA flash", "memcpy"}
    if suite.DEVICE == "cpu":
        m = models.ModelGroup("transformer", "small", "forward", torch.bfloat16)
        of_models = models.ModelContenders(m, ("reference", "ours"))
        assert all("plain loops" in reason for reason in of_models.why_not.values())
        assert of_models.prepare == {}


def test_options_that_make_no_sense_are_refused_by_name() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET" and not k.startswith("PYTEST")}
    for option, message in (("--budget=nan", "invalid minutes value: 'nan'"), ("--isa=avx9", "invalid choice: 'avx9'")):
        done = fresh.python(*("-m", "pytest", "benchmarks", "--benchmark-only", option), env=environment, cwd=ROOT)
        assert done.returncode == 4
        assert f"argument {option.partition('=')[0]}: {message}" in done.stderr
