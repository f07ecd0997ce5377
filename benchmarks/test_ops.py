"""Every registered operation with benchmark shapes: this package's backends, eager, torch.compile, torch's own
functions, Liger, and the limit, a memcpy of the same bytes or a GEMM.

`extra_info` of a row has GB/s (or TFLOP/s), the speed-up over each peer, `of_limit`, the fraction of the limit's rate
(medians of rounds in which all took turns), the peak memory of a run and, with a backward pass, the saved bytes; on a
GPU also the time between events and the time in a replayed graph. "memcpy" writes to an existing tensor, "fresh memcpy"
to a new one, which on a CPU includes page faults. `suite.Group` explains the states of memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.budget import Unit
from benchmarks.calls import Contenders
from benchmarks.conftest import Record
from benchmarks.measure import latest, replay
from benchmarks.rows import FULL, QUICK, Measured
from benchmarks.suite import Group, groups
from benchmarks.tables import shape_of
from foundry_kernels.core.registry import short_dtype


def unit(params: Mapping[str, Any]) -> Unit:
    group: Group = params["group"]
    shape, what = (
        f"{group.op.name} {shape_of({'case': group.case.id})}",
        f"{group.direction} {short_dtype(group.dtype)}",
    )
    return Unit(group.id, shape, group.limit, group.size, group.op.name, what)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = bool(metafunc.config.getoption("full", False))
    rows = [pytest.param(g, n, id=f"{g.id}-{n}") for g in groups(full) for n in g.chosen(full)]
    metafunc.parametrize(("group", "name"), rows)


@pytest.mark.benchmark(timer=replay)
def test_op(benchmark: Any, group: Group, name: str, record: Record) -> None:
    if benchmark.disabled:  # only tests that it runs
        contenders = Contenders(replace(group, memory="warm"), (name,))
        if name in contenders.why_not:
            pytest.skip(contenders.why_not[name])
        benchmark.pedantic(contenders.prepare[name]())
        return
    effort = FULL if record.full else QUICK
    names = group.chosen(record.full)
    measured = latest.get(group.id, lambda: Measured(group, effort, names, fraction=record.fraction))
    with measured.memory():
        row = measured.row(name)
        record.absent(row)
    record(benchmark, row, group.id, measured.times[name])
