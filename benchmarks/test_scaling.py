"""Growth of time and memory with the shape and with threads, as fitted exponents compared with theory. It finds
functions that are quadratic instead of linear. A row is one operation along one axis; its figures have a line for each
contender."""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import foundry_kernels as fk
from benchmarks.budget import Unit
from benchmarks.calls import Contenders
from benchmarks.conftest import Record
from benchmarks.measure import exponent, last_exponent, release, replay
from benchmarks.rows import Measured
from benchmarks.suite import DEVICE, DTYPES, SEARCHED, Group, case_bytes, smallest_case, timed_cases
from foundry_kernels.core.registry import OpSpec, short_dtype
from foundry_kernels.testing import Case

#: Seconds and rounds for each point.
_QUICK, _FULL = (0.2, 7), (1.0, 15)
#: The maximum bytes and operations of a call of the quick set on a CPU; the first three points have no limit.
_QUICK_BYTES, _QUICK_FLOPS = 3e8, 1e10


@dataclass(frozen=True)
class Scaling:
    """An operation at growing sizes of `axis`, which is a letter of the op or "threads"."""

    op: OpSpec
    axis: str
    direction: str
    dtype: torch.dtype
    points: tuple[tuple[int, Case], ...]

    @property
    def id(self) -> str:
        return f"{self.op.name}-scaling-{self.axis}-{self.direction}-{short_dtype(self.dtype)}"


def scalings(full: bool) -> Iterator[Scaling]:
    """The quick set has one dtype, the first axis and threads, the forward pass and, for matmuls over tokens, the
    backward pass."""
    for op in fk.OPS.values():
        if op.bench is None:
            continue
        axes = dict(op.bench.scaling_cases(op.name, DEVICE))
        if not full:
            axes = {axis: _quick(op, points) for axis, points in list(axes.items())[:1]}
        if DEVICE == "cpu":
            axes |= _threads(op)
        for axis, points in axes.items():
            trains = any(a is not None and a.grad for a in points[-1][1].args.values())
            products = Group(op, points[-1][1], DTYPES[0], "forward").flops is not None
            directions = op.bench.DIRECTIONS if full else op.bench.DIRECTIONS[: 2 if products and axis == "T" else 1]
            for direction in directions if trains else ("forward",):
                for dtype in DTYPES if full else DTYPES[-1:] if DEVICE == "cuda" else DTYPES[:1]:
                    yield Scaling(op, axis, direction, dtype, points)


def _quick(op: OpSpec, points: tuple[tuple[int, Case], ...]) -> tuple[tuple[int, Case], ...]:
    if DEVICE != "cpu":
        return points
    groups = [Group(op, case, DTYPES[0], "forward") for _, case in points]
    few = [g.bytes_moved <= _QUICK_BYTES and (g.flops or 0) <= _QUICK_FLOPS for g in groups]
    return points[: max(3, sum(few))]


def _threads(op: OpSpec) -> dict[str, tuple[tuple[int, Case], ...]]:
    """The shape of the quick set with the most computation, or the most memory without matmuls: preferably without
    masks and dropout, and with more than one token."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    of = [group for case in timed_cases(op) if (group := Group(op, case, DTYPES[0], "forward")).quick]
    if not of or cores < 2:
        return {}

    def size(group: Group) -> tuple[bool, bool, int]:
        case = group.case
        plain = not case.options.get("dropout_p") and "attn_mask" not in case.args
        return plain, "decode" not in case.id, group.flops or case_bytes(case, torch.float32)

    counts = [2**i for i in range(cores.bit_length()) if 2**i < cores] + [cores]
    return {"threads": tuple((n, max(of, key=size).case) for n in counts)}


@contextmanager
def _with_threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _names(group: Group, full: bool) -> tuple[str, ...]:
    """Omits compiled forms, which would be compiled for each shape, and slow ones."""
    left_out = ("torch.compile", SEARCHED, "FlexAttention", *(() if full else ("eager", "SDPA math")))
    return tuple(n for n in group.names if n not in left_out)


def _measure(scaling: Scaling, effort: tuple[float, int], fraction: float) -> dict[str, Any]:
    lines: dict[str, dict[str, list[Any]]] = {}
    for index, (size, case) in enumerate(scaling.points):
        group = Group(scaling.op, case, scaling.dtype, scaling.direction, "cold")
        with _with_threads(size if scaling.axis == "threads" else None):
            names = _names(group, effort == _FULL)
            # test_ops checks results; here contenders are not compared with each other.
            measured = Measured(group, effort, names, least=3, checked=False, fraction=fraction)
            with measured.memory():
                for name in (*measured.times, *measured.why_not):
                    row = measured.row(name)
                    line = lines.setdefault(name, {})
                    for key in ("median_us", "peak_bytes", "GB/s", "TFLOP/s", "of_limit", "why_not"):
                        if key in row:
                            line.setdefault(key, [None] * len(scaling.points))[index] = row[key]
            del measured
        release()
    sizes = [size for size, _ in scaling.points]
    fitted = {name: {**line, **fit(sizes, line)} for name, line in lines.items()}
    return {"axis": scaling.axis, "sizes": sizes, "lines": fitted, **theory(scaling)}


def theory(scaling: Scaling) -> dict[str, dict[str, float]]:
    """Returns the theoretical exponents over the upper half of the sizes: for time, that of the operations or bytes of
    a call, whichever grows faster; for memory, that of its outputs and gradients. With threads, time should
    decrease."""
    if scaling.axis == "threads":
        return {"theory": {"time": -1.0}}
    sizes = [size for size, _ in scaling.points]
    of = [Group(scaling.op, case, scaling.dtype, scaling.direction) for _, case in scaling.points]
    moved = last_exponent(sizes, [g.bytes_moved for g in of]) or 0.0
    computed = last_exponent(sizes, [g.flops or 1 for g in of]) or 0.0
    made = last_exponent(sizes, [g.bytes_made for g in of]) or 0.0
    return {"theory": {"time": round(max(moved, computed), 2), "memory": round(made, 2)}}


def fit(sizes: Sequence[float], line: dict[str, list[Any]]) -> dict[str, float]:
    """Exponents of time and memory over the measured sizes, and with the prefix `last_` over their upper half."""
    found = {}
    for name, key in (("time", "median_us"), ("memory", "peak_bytes")):
        known = {x: y for x, y in zip(sizes, line.get(key, ()), strict=False) if y}
        for prefix, function in (("", exponent), ("last_", last_exponent)):
            if (value := function([*known], [*known.values()])) is not None:
                found[f"{prefix}{name}_exponent"] = round(value, 2)
    return found


def unit(params: Mapping[str, Any]) -> Unit:
    scaling: Scaling = params["scaling"]
    of = [Group(scaling.op, case, scaling.dtype, scaling.direction, "cold") for _, case in scaling.points]
    return Unit(scaling.id, f"growth of {scaling.op.name} over {scaling.axis}", "growth", max(g.size for g in of))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = bool(metafunc.config.getoption("full", False))
    metafunc.parametrize("scaling", [pytest.param(s, id=s.id) for s in scalings(full)])


@pytest.mark.benchmark(timer=replay)
def test_scaling(benchmark: Any, scaling: Scaling, record: Record) -> None:
    ours = Group(scaling.op, scaling.points[0][1], scaling.dtype, scaling.direction).ours[0]
    if benchmark.disabled:
        size, case = scaling.points[0]
        threads = size if scaling.axis == "threads" else None  # all these points have the largest shape
        case = case if threads is None else smallest_case(scaling.op)
        with _with_threads(threads):
            contenders = Contenders(Group(scaling.op, case, scaling.dtype, scaling.direction, "warm"), (ours,))
            if ours in contenders.why_not:
                pytest.skip(contenders.why_not[ours])
            benchmark.pedantic(contenders.prepare[ours]())
        return
    row: dict[str, Any] = {"kind": "scaling", "op": scaling.op.name, "row": ours, "direction": scaling.direction}
    row |= {"dtype": short_dtype(scaling.dtype), "case": f"by {scaling.axis}", "memory": "cold"}
    row |= _measure(scaling, _FULL if record.full else _QUICK, record.fraction)
    line = row["lines"][ours]
    if not any(line.get("median_us", ())):
        record.absent(row | {"why_not": next(r for r in line["why_not"] if r)})
    measured = [us for us in line["median_us"] if us]
    row["median_us"] = statistics.median(measured)
    row |= {key: line[key] for key in ("time_exponent", "memory_exponent", "last_time_exponent") if key in line}
    record(benchmark, row, scaling.id, [us / 1e6 for us in measured])
