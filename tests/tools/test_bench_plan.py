"""What a run of the benchmarks leaves out for its time and its memory. Clocks are made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import budget, calls, liger, suite, tables, test_ops
from benchmarks.budget import Budget, Unit, collected

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


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_form_that_does_not_fit_on_a_gpu_is_left_out_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention materializes all scores; the rest of the comparison needs none of that."""
    monkeypatch.setattr(suite, "DEVICE", "cuda")
    monkeypatch.setattr(suite, "cache_bytes", lambda device: 50 * 2**20)
    monkeypatch.setattr(suite, "free_bytes", lambda device: 84e9)
    monkeypatch.setattr(liger, "why_not", lambda device: None)
    monkeypatch.setattr(suite, "DTYPES", (torch.bfloat16,))
    g = next(g for g in suite.groups(False, "cuda") if g.case.id == "B=4 H=32 Hk=8 T=4096 D=128-causal")
    for name in ("eager", "torch.compile", "SDPA math"):
        assert "GB, and 84.0 are free, of which" in str(suite.too_large(g, name))
    assert suite.too_large(g) is suite.too_large(g, "SDPA cuDNN") is None
    monkeypatch.setattr(suite, "free_bytes", lambda device: 140e9)
    assert suite.too_large(g, "eager") is None, "an H200 has room for it"


def test_the_reason_is_in_the_row_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    group = next(g for g in suite.groups(False, "cpu") if g.case.id.endswith("Hk=2 T=512 D=64-causal"))
    monkeypatch.setattr(suite, "free_bytes", lambda device: 2 * suite.group_bytes(group) + 2)
    found = calls.Contenders(group, ("native", "eager"))
    assert set(found.prepare) == {"native"}
    assert "half is left to others" in found.why_not["eager"]


# --- the command ------------------------------------------------------------------------------------------------------
