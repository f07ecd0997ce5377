"""Host time of a call: the smallest case of each operation, without gradients.

Without a GPU, also the host time of Triton kernels (this package's and Liger's) with a stub in place of the launch,
with and without gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import stub_gpu  # of tests/support
import torch

import foundry_kernels as fk
from benchmarks import liger
from benchmarks.budget import LATER, Unit
from benchmarks.calls import unavailable
from benchmarks.conftest import Record
from benchmarks.measure import host_times, replay
from benchmarks.noise import LEAST, against_itself
from benchmarks.suite import DEVICE, LIMITS, Group, case_bytes, smallest_case, timed_cases
from foundry_kernels.core.registry import OpSpec
from foundry_kernels.testing import Case


def _rows() -> list[Any]:
    rows = []
    for op in fk.OPS.values():
        if op.bench is None:
            continue
        group = Group(op, smallest_case(op), torch.float32, "forward", "warm")
        peers = group.chosen(False) if timed_cases(op) else group.ours
        names = dict.fromkeys(("reference", *(n for n in peers if n not in LIMITS)))
        rows += [pytest.param(group, n, id=f"{op.name}-overhead-{n}") for n in names]
    return rows


def unit(params: Mapping[str, Any]) -> Unit:
    op = params["op"] if "op" in params else params["group"].op
    kind = f"stubbed-overhead-{params['direction']}" if "op" in params else "overhead"
    return Unit(f"{op.name}-{kind}", f"{op.name} {kind}", "overhead", place=LATER)


def _measure(benchmark: Any, call: Callable[[], object], row: dict[str, Any], group: str, record: Record) -> None:
    if benchmark.disabled:
        benchmark.pedantic(call)
        return
    times = host_times(call, batches=max(round(15 * record.fraction), LEAST))
    middle = round(statistics.median(times) * 1e6, 2)
    row |= {"median_us": middle, "host_us": middle, "itself": round(against_itself(times) or 0.0, 4)}
    record(benchmark, row, group, times)


@pytest.mark.benchmark(timer=replay)
@pytest.mark.parametrize(("group", "name"), _rows())
def test_overhead(benchmark: Any, group: Group, name: str, record: Record) -> None:
    row: dict[str, Any] = {"kind": "overhead", "op": group.op.name, "row": name, "case": group.case.id}
    row |= {"direction": "forward", "dtype": "float32", "memory": "warm"}
    found = None if name in (*group.ours, "reference") else group.peers[name]
    if isinstance(found, str):
        record.absent(row | {"why_not": found})
    function = group.function(name)
    args = {n: None if t is None else t.detach() for n, t in group.case.make(group.dtype, DEVICE).items()}
    with torch.no_grad():
        try:
            function(**args)
        except Exception as error:
            record.absent(row | {"why_not": unavailable(error, ours=found is None)})
        _measure(benchmark, lambda: function(**args), row, f"{group.op.name}-overhead", record)


# --- the launch stubbed -----------------------------------------------------------------------------------------------


def _small_case(op: OpSpec) -> Case:
    """Returns the smallest case with rows of a multiple of 16 bytes, as in models; others would be copied. Where an
    argument has no such rows in any case, as the filters of a convolution, it is the smallest with such first rows."""
    like = smallest_case(op)
    given = [name for name, a in like.args.items() if a]
    plain = [
        case
        for case in op.cases.CASES[op.name]
        if {name for name, a in case.args.items() if a} == {*given}
        and all(a.layout == "contiguous" and 0 not in a.shape for a in case.args.values() if a)
    ]

    def with_rows(names: list[str]) -> list[Case]:
        args = [[c.args[name] for name in names] for c in plain]
        return [
            c for c, own in zip(plain, args, strict=True) if all(a and (a.dtype or a.shape[-1] % 16 == 0) for a in own)
        ]

    return min(with_rows(given) or with_rows(given[:1]), key=lambda c: case_bytes(c, torch.float32))


def _stubbed_rows() -> list[Any]:
    ops = [op for op in fk.OPS.values() if op.bench is not None and op.impl("triton") is not None]
    named = [(op, name) for op in ops for name in ("triton", *liger.peers(op.name, "cuda"))]
    return [
        pytest.param(op, name, direction, id=f"{op.name}-stubbed-overhead-{name}-{direction}")
        for op, name in named
        for direction in ("forward", "both")
        if direction == "forward" or any(a.grad for a in smallest_case(op).args.values() if a)
    ]


@pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU")
@pytest.mark.benchmark(timer=replay)
@pytest.mark.parametrize(("op", "name", "direction"), _stubbed_rows())
def test_stubbed_overhead(benchmark: Any, op: OpSpec, name: str, direction: str, record: Record) -> None:
    case = _small_case(op)
    shown = f"{name}, {direction}, launch stubbed"
    row: dict[str, Any] = {"kind": "overhead", "op": op.name, "row": shown, "case": case.id}
    row |= {"direction": direction, "dtype": "bfloat16", "memory": "warm"}
    if reason := stub_gpu.why_not():
        record.absent(row | {"why_not": reason})
    if name == liger.NAME:
        found = liger.peers(op.name, "cuda")[name]
        if isinstance(found, str):
            record.absent(row | {"why_not": found})
        function: Callable[..., Any] = found  # type: ignore[assignment]
    else:
        function = lambda **args: op.public(**args, **case.options, backend="triton")  # noqa: E731
    with stub_gpu.stub_gpu(stub_gpu.StubDriver()):
        call = _forward(function, case) if direction == "forward" else _both(function, case)
        _measure(benchmark, call, row, f"{op.name}-stubbed-overhead-{direction}", record)


def _forward(function: Callable[..., Any], case: Case) -> Callable[[], object]:
    args = {n: None if t is None else t.detach() for n, t in case.make(torch.bfloat16).items()}

    def call() -> object:
        with torch.no_grad():
            return function(**args)

    return call


def _both(function: Callable[..., Any], case: Case) -> Callable[[], object]:
    args = case.make(torch.bfloat16)
    wanted = [t for t in args.values() if t is not None and t.requires_grad]

    def outputs() -> list[torch.Tensor]:
        out = function(**args)
        return [o for o in (out if isinstance(out, tuple) else (out,)) if o.requires_grad]

    cotangents = [torch.ones_like(o) for o in outputs()]
    return lambda: torch.autograd.grad(outputs(), wanted, cotangents)
