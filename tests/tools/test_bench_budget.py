"""What benchmarks leave out to keep their time and memory, and their verdict. Clocks are made up: no time decides a
test."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from benchmarks import budget, calls, measure, suite, tables, test_ops, verdict
from benchmarks.budget import Budget, Unit, collected, plan
from foundry_kernels.ops.flash_attention import bench_masked
from foundry_kernels.testing import Arg, Case


@pytest.fixture(autouse=True)
def ten_seconds_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in budget.ROW_SECONDS:
        monkeypatch.setitem(budget.ROW_SECONDS, kind, 10.0)


def unit(name: str, **changes: Any) -> Unit:
    return Unit(name, changes.pop("shape", name), changes.pop("kind", "memcpy"), **changes)


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_what_fits_is_measured_whole() -> None:
    assert plan([unit("a", rows=2), unit("b")], 30) == budget.Plan(1.0, (), 30)


def test_rounds_are_cut_before_shapes() -> None:
    units = [unit("a", size=2), unit("b", size=1)]
    assert plan(units, 19) == budget.Plan(0.5, (), 15)
    assert plan(units, 14) == budget.Plan(0.5, ("a",), 7.5)


def test_the_largest_shapes_are_cut_first_and_whole() -> None:
    units = [
        unit("small forward", shape="small", size=1),
        unit("large forward", shape="large", size=5),
        unit("large backward", shape="large", size=9),
        unit("middle", size=7),
    ]
    assert plan(units, 29).cut == ("large",)
    assert [u.id for u in budget.ordered(units)] == ["small forward", "middle", "large forward", "large backward"]
    assert plan(units, 14).cut == ("large", "middle")
    assert plan(units, 5).cut == ("large", "middle", "small")


def test_what_is_needed_is_measured_first_and_cut_last() -> None:
    rows = [
        unit("model", size=99, place=budget.LATER),
        unit("rope large", op="rope", size=8),
        unit("rope small", op="rope", size=3),
        unit("swiglu small", op="swiglu", size=1),
        unit("swiglu large", op="swiglu", size=2),
        unit("growth", size=1),
    ]
    units = collected(rows)
    assert [u.id for u in budget.ordered(units)] == [
        *("rope small", "swiglu small", "model", "growth", "swiglu large", "rope large")
    ]
    assert plan(units, 30).cut == ("rope large", "swiglu large")
    assert plan(units, 23).cut == ("rope large", "swiglu large", "growth")
    assert plan(units, 8).cut == ("rope large", "swiglu large", "growth", "model", "swiglu small")


def test_the_shapes_that_are_needed_have_every_direction_and_dtype() -> None:
    """The smallest shape has no backward pass: the next one has everything, and is the one that is needed."""
    both = ("forward float32", "forward bfloat16", "backward float32", "backward bfloat16")
    rows = [unit(f"decode {what}", shape="decode", op="rope", what=what, size=1) for what in both[:2]]
    rows += [
        unit(f"{s} {what}", shape=s, op="rope", what=what, size=n)
        for n, s in ((5, "large"), (3, "cached"))
        for what in both
    ]
    assert {u.shape for u in collected(rows) if u.place == budget.NEEDED} == {"cached"}
    rows = [r for r in rows if r.id != "cached forward float32"]
    assert {u.shape for u in collected(rows) if u.place == budget.NEEDED} == {"large"}
    rows = [r for r in rows if r.id != "large backward float32"]
    assert {u.shape for u in collected(rows) if u.place == budget.NEEDED} == {"cached", "decode"}


@pytest.mark.skipif(suite.DEVICE != "cpu", reason="the quick set of a CPU")
def test_every_operation_direction_and_dtype_is_needed_of_the_quick_set() -> None:
    units = collected([test_ops.unit({"group": g}) for g in suite.groups(False)])
    of = {(u.op, u.what): False for u in units}
    of |= {(u.op, u.what): True for u in units if u.place == budget.NEEDED}
    assert all(of.values())
    assert sum(u.place == budget.NEEDED for u in units) < len(units) / 2
    assert {u.kind for u in units} == {"memcpy", "GEMM"}


def test_rows_of_a_comparison_are_one_unit() -> None:
    [found] = collected([unit("a")] * 3)
    assert found.rows == 3
    assert (found.seconds(), found.seconds(0.5)) == (30, 22.5)


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
    kept, _ = run([unit(str(i), rows=4) for i in range(10)], 8)
    assert set(kept.decided.values()) == {1.0}
    assert kept.kept() == {"minutes": 8, "spent": 6.7, "comparisons": 10, "cut": {}, "fewer_rounds": 0}


@pytest.mark.parametrize("slower", [0.5, 2.0, 3.0, 6.0])
def test_a_machine_that_is_slower_than_expected_keeps_the_time(slower: float) -> None:
    units = [unit(f"{i}", size=i % 7, shape=f"shape {i % 7}") for i in range(70)]
    kept, clock = run(units, 8, slower)
    assert clock.now - 100 <= 8 * 60
    measured = [i for i, share in enumerate(kept.decided.values()) if share is not None]
    assert len(measured) * 7.5 * slower > 0.5 * min(8 * 60, 70 * 7.5 * slower)  # and does not give up most of it either
    assert len(kept.decided) == 70


def test_what_was_to_be_cut_comes_back_on_a_faster_machine() -> None:
    units = [unit(f"{i}", size=i, rows=6) for i in range(16)]
    assert plan(units, 8 * 60).cut
    kept, clock = run(units, 8, slower=0.25)
    assert None not in kept.decided.values()
    assert clock.now - 100 <= 8 * 60


def test_what_one_kind_takes_says_nothing_of_another() -> None:
    kept = Budget([unit("a", rows=10), unit("b"), unit("c", kind="model")], 60, 0.0, Clock())
    assert kept.admit("a") == 1.0
    kept.spend("a", 300)
    assert kept.rates["memcpy"] == pytest.approx(320 / 12)
    assert kept.rates["model"] == 10


def test_operations_without_any_row_are_named() -> None:
    units = [
        unit("rope", op="rope", rows=3), unit("swiglu", op="swiglu", rows=5), unit("swiglu large", op="swiglu", rows=5)
    ]  # fmt: skip
    kept, _ = run(collected(units), 1)
    assert kept.kept()["none_of"] == ["swiglu"]
    assert "No row of swiglu: this machine was too slow, or too busy." in tables.cuts(kept.kept())
    assert "none_of" not in run(collected(units), 2.2)[0].kept()


def test_without_a_budget_nothing_is_cut() -> None:
    kept, _ = run([unit(str(i), rows=100) for i in range(10)], 0, slower=5)
    assert set(kept.decided.values()) == {1.0}
    assert tables.cuts(kept.kept()) == []
    assert "no budget" in kept.announced()[0]


def test_the_announcement_and_the_progress_say_what_is_left() -> None:
    clock = Clock()
    units = [unit("a", size=1, rows=12), unit("b", size=2, rows=14)]
    kept = Budget(units, 2, 100.0, clock)
    first, fewer, cut = kept.announced()
    assert "50%" in fewer
    assert first == "26 rows in 2 comparisons, about 1.5 min; budget 2 min (--budget, 0 for none)"
    assert cut == "  left out unless time is left: 1 shapes, b"
    assert kept.progress() == "0.0 min: 0 of 12 rows, about 1.5 min to go"
    assert kept.admit("a") == 0.5
    clock.now += 90
    kept.spend("a", 90)
    assert kept.admit("b") is None
    assert kept.progress() == "1.5 min: 12 of 12 rows, about 0.0 min to go"
    assert tables.cuts(kept.kept()) == [
        "Left out to keep 2 min: b (14 of 14 rows).",
        "Fewer rounds in 1 of 2 comparisons.",
    ]


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

    def counted(out: tuple[torch.Tensor, ...], layout: str, drawn_on: str) -> tuple[torch.Tensor, ...]:
        made.extend(found := real(out, layout, drawn_on=drawn_on))
        return found

    monkeypatch.setattr(calls, "make_cotangents", counted)
    found = calls.Contenders(group(64, direction="backward", memory="cold"), ("native", "eager", "F.rms_norm"))
    assert len(found.prepare) >= 2
    assert len(made) == 1


def test_contenders_settle_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    faults, ran = iter([0, 90, 90, 90, 90, 90]), []
    usage = lambda who: types.SimpleNamespace(ru_minflt=next(faults))  # noqa: E731
    monkeypatch.setattr(measure.resource, "getrusage", usage)
    measure.settle({n: (lambda n=n: lambda: ran.append(n)) for n in "ab"}, 8)
    assert "".join(ran) == "ababab"  # one turn with page faults, two without
    ran.clear()
    faults = iter(range(0, 1000, 50))
    measure.settle({"a": lambda: lambda: ran.append("a")}, 4)
    assert len(ran) == 4


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


def test_a_call_without_the_option_is_no_peer() -> None:
    assert bench_masked.PLAIN == tables.WITHOUT
    rows = [
        row("flash_attention", {tables.WITHOUT: 0.8, "eager": 4.0}, case="2x4-bias"),
        row("flash_attention", {tables.WITHOUT: 0.5, "eager": 3.0}, case="2x4-dropout", direction="backward"),
    ]
    assert verdict.lines(rows) == [
        "It pays here:",
        "  flash_attention forward: 4.00x eager",
        "  flash_attention backward: 3.00x eager",
        "None of 2 benchmarks is slower than a peer.",
    ]
    assert verdict.slower({"rows": rows}) == ([], 2)


def test_a_verdict_fits_a_screen_and_may_have_nothing_to_say() -> None:
    many = [row(f"op{i % 8}", {"eager": 0.5 + i / 100}, direction=("forward", "backward")[i % 2]) for i in range(30)]
    found = verdict.lines(many)
    assert found[-1] == "  and 18 more"
    assert len(found) <= 30
    assert verdict.lines([]) == []
    of = {
        "minutes": 8,
        "spent": 7.5,
        "comparisons": 9,
        "fewer_rounds": 0,
        "cut": {f"shape {i}": [1, 2] for i in range(9)},
    }
    assert tables.cuts(of, most=2) == [
        "Left out to keep 8 min: shape 0 (1 of 2 rows); shape 1 (1 of 2 rows); and 7 more."
    ]
    assert "shape 8 (1 of 2 rows)" in tables.cut({"budget": of}).replace("\n", " ")
    assert verdict.lines([row("rope", {"eager": 2.0})])[-1] == "None of 1 benchmarks is slower than a peer."


def test_a_run_that_got_new_pages_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as is said; then it counts."""
    pages, ran = [0], []
    monkeypatch.setattr(measure, "new_pages", lambda: pages[0])

    def run() -> None:
        ran.append(len(ran))
        pages[0] += len(ran) <= 2  # the first two bring one each

    times = measure.interleaved({"a": lambda: run}, 0.0, 1, warm_ups=0, least=1, first=0, again=3)
    assert (len(times["a"]), len(ran)) == (1, 3)
    ran.clear()
    measure.interleaved({"a": lambda: run}, 0.0, 1, warm_ups=0, least=1, first=0, again=1)
    assert len(ran) == 2
    ran.clear()
    measure.interleaved({"a": lambda: run}, 0.0, 1, warm_ups=0, least=1, first=0)
    assert len(ran) == 1
