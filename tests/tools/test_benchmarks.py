"""What the benchmarks measure with and compare. No time decides a test."""

from __future__ import annotations

import dataclasses
import inspect
import sys
import types
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from benchmarks import calls, checks, measure, models, rows, suite, test_scaling
from benchmarks.test_scaling import fit
from foundry_kernels.core.registry import OpSpec
from foundry_kernels.testing import Arg, Case

ROOT = Path(__file__).parents[2]


def test_contenders_take_turns() -> None:
    order: list[str] = []
    times = measure.interleaved({n: (lambda n=n: lambda: order.append(n)) for n in "ab"}, seconds=60, rounds=7)
    assert [len(t) for t in times.values()] == [7, 7]
    assert "".join(order) == "aabb" + "aabb" * 7  # warm-up, then in each round an untimed run and a timed one of each
    assert measure.median_ratio([2.0, 20.0, 3.0], [1.0, 10.0, 1.0]) == 2.0  # of rounds, not of medians


def test_peak_memory_counts_what_is_held_at_once() -> None:
    x = torch.randn(1 << 18)  # 1 MB

    def two_after_each_other() -> object:
        x.clone()
        return x.clone()

    def two_at_once() -> object:
        return x.clone(), x.clone()

    assert measure.peak_bytes(lambda: two_after_each_other, "cpu") == 1 << 20
    assert measure.peak_bytes(lambda: two_at_once, "cpu") == 2 << 20


def test_saved_memory_counts_storages_once() -> None:
    x = torch.randn(1 << 18, requires_grad=True)  # 1 MB
    assert measure.saved_bytes(lambda: x.sin().cos()) == 2 << 20
    assert measure.saved_bytes(lambda: x * x.detach()) == 1 << 20
    assert measure.saved_bytes(lambda: x + 1) == 0


def test_exponents_of_lines() -> None:
    """The upper half of the sizes shows a square that a constant hides."""
    sizes = [2**i for i in range(6)]
    line = {"median_us": [100.0 + size**2 for size in sizes] + [None], "peak_bytes": [size**2 for size in sizes]}
    found = fit([*sizes, 64], line)
    assert found["time_exponent"] < 0.8 < 1.2 < found["last_time_exponent"]
    assert found["memory_exponent"] == found["last_memory_exponent"] == 2.0
    assert fit([1, 2], {"why_not": ["no", "no"]}) == {}
    for x, y in (([4], [1.0]), ([4, 4], [1.0, 2.0]), ([4, 8], [0.0, 2.0])):
        assert measure.exponent(x, y) is None


def scaling(op: str, axis: str, direction: str = "forward") -> test_scaling.Scaling:
    spec = fk.OPS[op]
    assert spec.bench is not None
    return test_scaling.Scaling(spec, axis, direction, torch.float32, spec.bench.scaling_cases(op, "cpu")[axis])


@pytest.mark.skipif(suite.DEVICE != "cpu", reason="the axes of a CPU")
def test_growth_is_over_tokens_width_vocabulary_batch_and_threads() -> None:
    """The least and the largest size are valid calls; the quick ones are short, but enough of them for an exponent.
    Beyond 4096 tokens no peer makes all scores: eager attention over 16,384 took 24 GB."""
    full, quick = ([*test_scaling.scalings(full)] for full in (True, False))
    assert {(s.op.name, s.axis) for s in quick} < {(s.op.name, s.axis) for s in full}
    assert {s.axis for s in full} >= {"T", "N", "V", "B", "D", "S"}
    for s in (*full, *quick):
        for _, case in (s.points[0], s.points[-1]) if s in quick or s.dtype == torch.float32 else ():
            group = suite.Group(s.op, case, s.dtype, s.direction)
            assert group.bytes_made > 0
            assert s not in quick or (group.flops or 0) <= 3 * test_scaling._QUICK_FLOPS
        assert s not in quick or len(s.points) >= 3 or s.axis == "threads"
    tokens, longest = scaling("flash_attention", "T").points[-1]
    group = suite.Group(fk.OPS["flash_attention"], longest, torch.float32, "forward")
    named = "materializes the matrix of scores, left out beyond 4096 tokens"
    assert {name for name, why in group.peers.items() if why == named} >= {"eager", "torch.compile", "SDPA math"}
    assert tokens == 16384
    assert suite.group_bytes(group) < 4e9


# --- what is compared -------------------------------------------------------------------------------------------------


def test_every_operation_is_in_the_quick_set_and_that_is_part_of_the_full_one() -> None:
    quick, full = ([g.id for g in suite.groups(full)] for full in (False, True))
    assert len(set(full)) == len(full)
    assert set(quick) < set(full)
    timed = {op.name for op in fk.OPS.values() if suite.timed_cases(op)}
    assert {g.op.name for g in suite.groups(False)} == timed
    assert not any("fresh" in i for i in quick)
    assert {g.op.name for g in suite.groups(False) if g.direction == "both"} == {
        "linear_cross_entropy",
        "linear_kl_div",
        "linear_log_probs",
    }
    decoding = [g for g in suite.groups(False) if "decode" in g.case.id]
    assert {g.direction for g in decoding} == {"forward"}
    assert {g.limit for g in decoding} == {"memcpy"}


@pytest.mark.skipif(suite.DEVICE != "cpu", reason="the quick set of a CPU")
def test_every_native_kernel_of_a_cpu_is_timed_forward_and_backward_in_the_quick_set() -> None:
    """Both directions are timed in one where the forward pass makes the gradients; the sums with dropout inside too."""
    timed = {(g.op.name, g.direction, bool(g.case.options.get("dropout_p")), g.dtype) for g in suite.groups(False)}
    kernels = [op for op in fk.OPS.values() if (impl := op.impl("native")) is not None and "cpu" in impl.sources]
    assert len(kernels) > 10
    for op in kernels:
        assert op.bench is not None, f"{op.name} is not timed"
        learns = any(a is not None and a.grad for case in suite.timed_cases(op, "cpu") for a in case.args.values())
        for direction, dtype in product(op.bench.DIRECTIONS[: 1 + learns], suite.DTYPES):
            assert (op.name, direction, False, dtype) in timed
            if "dropout_p" in inspect.signature(op.public).parameters:
                assert (op.name, direction, True, dtype) in timed


def small_group(**changes: object) -> suite.Group:
    case = Case("8x64", {"x": Arg((8, 64)), "weight": Arg((64,))}, {"round_before_weight": True})
    group = suite.Group(fk.OPS["rms_norm"], case, torch.float32, "forward", "warm")
    return dataclasses.replace(group, **changes)


def test_cold_inputs_do_not_fit_the_cache_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suite, "cache_bytes", lambda device: 30_000)
    rotating = calls.Arguments(small_group(memory="cold"))
    assert rotating.rotates
    assert len(rotating.sets) * suite.case_bytes(small_group().case, torch.float32) >= 60_000
    storages = {s["x"].data_ptr() for s in rotating.sets}  # type: ignore[union-attr]
    assert len(storages) == len(rotating.sets)
    assert len({id(rotating.next()) for _ in rotating.sets}) == len(rotating.sets)
    assert len(calls.Arguments(small_group()).sets) == 1
    monkeypatch.setattr(suite, "cache_bytes", lambda device: 10**9)
    many = calls.Arguments(small_group(memory="cold"))  # it would take thousands: the caches are scrubbed instead
    assert len(many.sets) == 2
    assert not many.rotates


def test_a_peer_that_computes_something_else_gets_no_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    group = small_group()
    peers = group.bench.peers(group.op.name, group.case, suite.DEVICE)
    wrong_peers = {**peers, "eager": lambda x, weight: x * weight}
    monkeypatch.setattr(group.bench, "peers", lambda *_: wrong_peers)
    measured = rows.Measured(group, (0.01, 5), (*group.ours, "eager", "F.rms_norm", "memcpy"))
    wrong, ours = measured.row("eager"), measured.row(group.ours[0])
    assert "output 0 is not the reference's" in wrong["wrong"]
    assert "speedup_over" not in wrong
    assert "F.rms_norm" in ours["speedup_over"]
    assert "eager" not in ours["speedup_over"]
    assert ours["of_limit"] > 0


def timed_forms() -> list[Any]:
    """By operation, the smallest of the cases that are timed with each choice of options, but for dropout: there peers
    are not checked, as they draw other elements."""
    found: dict[tuple[str, str], tuple[OpSpec, Case]] = {}
    for op in fk.OPS.values():
        for case in sorted(suite.timed_cases(op, "cpu"), key=lambda case: suite.case_bytes(case, torch.float32)):
            if not case.options.get("dropout_p"):
                found.setdefault((op.name, repr(case.options)), (op, case))
    return [
        pytest.param(op, case, id=f"{op.name}-{case.id}", marks=pytest.mark.slow if _is_large(op, case) else ())
        for op, case in found.values()
    ]


def _is_large(op: OpSpec, case: Case) -> bool:
    return (suite.Group(op, case, torch.float32, "forward").flops or 0) >= 1 << 28


@pytest.mark.parametrize(("op", "case"), timed_forms())
def test_peers_compute_the_same(op: OpSpec, case: Case) -> None:
    group = suite.Group(op, case, torch.float32, "forward", "warm")
    for name, peer in group.bench.peers(op.name, case, suite.DEVICE).items():
        if not isinstance(peer, str):
            assert wrong_of(group, name) is None, name


def test_a_kernel_of_ours_that_fails_parity_gets_no_ratio() -> None:
    group = small_group(dtype=torch.float32)
    backend = group.ours[0]

    def broken(**args: object) -> torch.Tensor:
        return fk.rms_norm(**args) * (1.001 if args["backend"] == backend else 1.0)

    group = dataclasses.replace(group, op=dataclasses.replace(group.op, public=broken, name="rms_norm"))
    checks._latest.clear()
    row = rows.Measured(group, (0.01, 5), (backend, "memcpy")).row(backend)
    assert "exceeds" in row["wrong"]
    assert "speedup_over" not in row
    assert "of_limit" not in row


class _Late(torch.autograd.Function):
    """What it is given; its gradient is wrong from row `start` on."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, start: int) -> torch.Tensor:
        ctx.start = start
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        dy = dy.clone()
        dy[ctx.start :] *= 1.5
        return dy, None


def wrong_of(group: suite.Group, name: str) -> str | None:
    checks._latest.clear()
    return checks.Check(group, group.case.make(group.dtype, suite.DEVICE)).wrong(name)


@pytest.mark.parametrize("name", ["ours", "eager"])
@pytest.mark.parametrize("start", [2048, 3999, 4000])
def test_a_result_that_is_wrong_in_late_rows_alone_is_found(
    name: str, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are sampled to the last one: the first and the last are always among the rows that are checked."""
    case = Case("4000x64", {"x": Arg((4000, 64)), "weight": Arg((64,))}, {"round_before_weight": True})
    group = small_group(case=case)
    name = group.ours[0] if name == "ours" else name

    def late(args: dict[str, Any]) -> torch.Tensor:
        return fk.rms_norm(**args, backend="reference", round_before_weight=True)

    def wrong_output(**args: Any) -> torch.Tensor:
        factor = torch.ones(4000, 1, device=suite.DEVICE)
        factor[start:] = 1.5
        return late(args) * factor

    def wrong_gradient(**args: Any) -> torch.Tensor:
        return _Late.apply(late(args | {"x": _Late.apply(args["x"], start)}), 4000)

    for function, direction in ((wrong_output, "forward"), (wrong_gradient, "backward")):
        timed = dataclasses.replace(group, direction=direction)
        monkeypatch.setattr(suite.Group, "function", lambda self, name, function=function: function)
        assert (wrong_of(timed, name) is None) == (start == 4000)
    assert wrong_of(group, name) is None  # the gradient alone is wrong, which no forward row computes


def test_what_dropout_leaves_is_checked_whole_and_of_ours_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"x": Arg((300, 16)), "residual": Arg((300, 16)), "weight": Arg((16,))}
    case = Case("300x16-dropout", args, {"dropout_p": 0.1, "dropout_seed": 0})
    group = suite.Group(fk.OPS["add_rms_norm"], case, torch.float32, "forward", "warm")
    assert group.bench.sample(case) is None
    assert wrong_of(group, group.ours[0]) is None
    assert wrong_of(group, "eager") is None  # draws other elements
    other = dataclasses.replace(case, options=dict(case.options) | {"dropout_seed": 1})
    wrong_seed = dataclasses.replace(group, case=other).function(group.ours[0])
    monkeypatch.setattr(suite.Group, "function", lambda self, name: wrong_seed)
    assert "exceeds" in str(wrong_of(group, group.ours[0]))


@pytest.mark.parametrize("op", [op.name for op in fk.OPS.values() if op.bench is not None])
def test_rows_that_are_sampled_are_rows_of_the_arguments(op: str) -> None:
    """It names rows that every argument has, the first and the last among them; of a recurrence, the first ones."""
    spec = fk.OPS[op]
    for case in suite.timed_cases(spec, "cpu"):
        sample = spec.bench.sample(case)  # type: ignore[union-attr]
        if sample is None:
            continue
        assert len(sample.rows) <= 256
        assert sample.rows.unique().equal(sample.rows)
        name, dim = next(iter(sample.dims.items()))
        shape = case.args[name].shape  # type: ignore[union-attr]
        recurrent = spec.package.endswith(("gated_delta_rule", "ssd"))
        assert sample.rows[-1] == (len(sample.rows) if recurrent else shape[dim]) - 1
        assert sample.rows[0] == 0 or case.options.get("causal") is not None  # of attention the last queries
        assert all(case.args[n].shape[d] == shape[dim] for n, d in sample.dims.items())  # type: ignore[union-attr]


def test_what_liger_exchanges_for_all_models_is_exchanged_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    home = types.ModuleType("a_modeling_module")
    exec("rotate = lambda: 'plain'", vars(home))

    class Model(torch.nn.Module):
        def forward(self) -> str:
            return home.rotate()

    def apply(model: torch.nn.Module) -> None:  # as Liger's does
        home.rotate = lambda: "exchanged"

    Model.__module__ = home.__name__
    stand_in = types.SimpleNamespace(_apply_liger_kernel_to_instance=apply)
    monkeypatch.setitem(sys.modules, home.__name__, home)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", stand_in)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.ModuleType("liger_kernel"))
    plain, patched = Model(), Model()
    models._patch_by_liger(patched)
    assert (plain(), patched(), plain()) == ("plain", "exchanged", "plain")
