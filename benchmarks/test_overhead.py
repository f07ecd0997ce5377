"""Host time of a call: the smallest case of each operation, without gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import foundry_kernels as fk
from benchmarks.calls import unavailable
from benchmarks.conftest import Record
from benchmarks.measure import host_time, replay
from benchmarks.suite import DEVICE, LIMITS, Group, smallest_case, timed_cases


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
            reason = unavailable(error, ours=found is None)
            if reason is None:
                raise
            record.absent(row | {"why_not": reason})
        if benchmark.disabled:
            benchmark.pedantic(function, kwargs=args)
            return
        seconds = host_time(lambda: function(**args))
    benchmark.group = f"{group.op.name}-overhead"
    replay.give(benchmark, [seconds])
    record(benchmark, row | {"median_us": round(seconds * 1e6, 2), "host_us": round(seconds * 1e6, 2)})
