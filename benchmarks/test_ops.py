"""Every registered operation that has benchmark shapes: our backends beside eager, torch.compile, torch's own, Liger,
and the limit: a memcpy of the same bytes or a GEMM.

`extra_info` of a row holds GB/s (or TFLOP/s), its speed-up over each peer and `of_limit`, its share of the limit's rate
(medians of rounds in which all took turns), the peak memory of one run and, where there is a backward pass, the bytes
saved for it; on a GPU also the time between events and that of a replayed graph. "memcpy" writes into a tensor that
exists; "fresh memcpy" into a new one, which on a CPU also pays for page faults. See `suite.Group` on memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.calls import Contenders
from benchmarks.conftest import Record
from benchmarks.measure import replay
from benchmarks.rows import FULL, QUICK, Measured
from benchmarks.suite import Group, groups

_last: list[Measured] = []  # rows of a group follow each other; its tensors need not outlive it


def _measured(group: Group, effort: tuple[float, int]) -> Measured:
    if not _last or _last[0].group is not group:
        _last.clear()
        _last.append(Measured(group, effort, group.chosen(effort == FULL)))
    return _last[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = bool(metafunc.config.getoption("full", False))
    rows = [pytest.param(g, n, id=f"{g.id}-{n}") for g in groups(full) for n in g.chosen(full)]
    metafunc.parametrize(("group", "name"), rows)


@pytest.mark.benchmark(timer=replay)
def test_op(benchmark: Any, group: Group, name: str, record: Record) -> None:
    if benchmark.disabled:  # whether it runs, not how fast
        contenders = Contenders(replace(group, memory="warm"), (name,))
        if name in contenders.why_not:
            pytest.skip(contenders.why_not[name])
        benchmark.pedantic(contenders.prepare[name]())
        return
    measured = _measured(group, FULL if record.full else QUICK)
    with measured.memory():
        row = measured.row(name)
        if record.absent(row):
            return
    benchmark.group = group.id
    replay.give(benchmark, measured.times[name])
    record(benchmark, row)
    if "wrong" in row:
        pytest.fail(f"no ratio is reported: {row['wrong']}")
