"""The figures of a group of rows: the times of all contenders, measured in turns, and figures derived from them."""

from __future__ import annotations

import contextlib
import statistics
from typing import Any

import torch

from benchmarks import measure, noise
from benchmarks.calls import MATMUL, Contenders
from benchmarks.checks import Check
from benchmarks.noise import LEAST, LEAST_GPU
from benchmarks.suite import DEVICE, LIMITS, Group
from foundry_kernels.core.registry import short_dtype

#: Seconds for the rounds of a group, and the maximum number of rounds.
QUICK, FULL = (0.6, 15), (2.0, 25)
#: The maximum seconds of a GPU's work in a graph. A graph has several short calls, so that its own launch does not
#: matter. Calls longer than `LONG` are not timed between events or in a graph, because host time is at most a percent
#: of them.
_GRAPH, LONG = 0.004, 0.02


class Measured:
    """The timed contenders of a group. `times` has a list of seconds for each one that could run, and `why_not` the
    reason for each one that could not. `wrong` has the difference for each wrong result (only if `checked`; otherwise
    ratios mean nothing). `fraction`: the fraction of the rounds, if there is no time for all."""

    def __init__(
        self,
        group: Group,
        effort: tuple[float, int] = QUICK,
        names: tuple[str, ...] | None = None,
        *,
        least: int = LEAST if DEVICE == "cpu" else LEAST_GPU,
        checked: bool = True,
        fraction: float = 1.0,
    ) -> None:
        self.group = group
        seconds, rounds = effort[0] * fraction, max(round(effort[1] * fraction), least)
        with self.memory():
            contenders = Contenders(group, names)
            self.prepare, self.why_not = contenders.prepare, contenders.why_not
            # After a few runs, the caches have the data that fits.
            warm_ups = 4 if group.memory == "warm" else 0
            self.untimed = contenders.untimed
            if DEVICE == "cpu":
                with self.untimed():
                    measure.settle(self.prepare, 24 if group.memory == "cold" and group.limit == "memcpy" else 1)
            again = 0 if group.memory == "fresh" or DEVICE == "cuda" else 3
            self.times = (
                measure.interleaved(self.prepare, seconds, rounds, warm_ups, least, first=0, again=again)
                if self.prepare
                else {}
            )
        self.wrong: dict[str, str] = {}
        if checked and self.prepare:
            check = Check(group, contenders.args)
            found = {name: check.wrong(name) for name in self.prepare}
            self.wrong = {name: problem for name, problem in found.items() if problem is not None}
        short = {n: p for n, p in self.prepare.items() if statistics.median(self.times[n]) <= LONG}
        self.device_times = measure.device_times(short) if DEVICE == "cuda" and short else {}

    def memory(self) -> contextlib.AbstractContextManager[None]:
        """Sets how the process treats freed memory while the group runs."""
        return contextlib.nullcontext() if self.group.memory == "fresh" else measure.reused_memory()

    def row(self, name: str) -> dict[str, Any]:
        """Returns a contender's row for the results."""
        group = self.group
        row: dict[str, Any] = {
            "kind": "op",
            "op": group.op.name,
            "row": name,
            "direction": group.direction,
            "dtype": short_dtype(group.dtype),
            "case": group.case.id,
            "memory": group.memory,
            "quick": group.quick,
        }
        if name in self.why_not:
            return row | {"why_not": self.why_not[name]}
        mine = self.times[name]
        with self.untimed():
            peak = measure.peak_bytes(self.prepare[name], DEVICE)
        middle = statistics.median(mine)
        quartiles = statistics.quantiles(mine, n=4)
        row |= {
            "median_us": round(middle * 1e6, 1),
            "spread_us": [round(q * 1e6, 1) for q in (quartiles[0], quartiles[2])],
            "peak_bytes": peak,
        }
        if name == "GEMM":
            return row | {"TFLOP/s": round(2 * MATMUL[DEVICE] ** 3 / middle / 1e12, 3)}
        row |= {"bytes_moved": group.bytes_moved, "GB/s": round(group.bytes_moved / middle / 1e9, 2)}
        if group.flops is not None and name not in LIMITS:
            row["TFLOP/s"] = round(group.flops / middle / 1e12, 4)
        if (count := group.bench.tokens_made(group.case)) is not None:
            row["tokens/s"] = round(count / middle, 1)
        row |= self._on_device(name)
        if name in LIMITS:
            return row
        row |= {"limit": group.limit}
        if "memcpy" in self.times:
            row["time_over_memcpy"] = round(measure.median_ratio(mine, self.times["memcpy"]), 3)
        if name in self.wrong:
            return row | {"wrong": self.wrong[name]}
        if group.limit in self.times:
            row["of_limit"] = round(self._of_limit(name), 4)
        others = {n: t for n, t in self.times.items() if n not in (*LIMITS, name) and n not in self.wrong}
        row["speedup_over"] = {n: round(measure.median_ratio(t, mine), 3) for n, t in others.items()}
        row["noise"] = {n: noise.of_peer(t, mine) for n, t in others.items()}
        if group.direction != "forward":
            args = group.case.make(group.dtype, DEVICE, drawn_on=DEVICE)
            row["saved_bytes"] = measure.saved_bytes(lambda: group.function(name)(**args))
        return row

    def _of_limit(self, name: str) -> float:
        """Returns the row's rate relative to its limit's, from medians of rounds: bytes or operations a second."""
        faster = measure.median_ratio(self.times[self.group.limit], self.times[name])
        if self.group.limit == "memcpy":
            return faster
        assert self.group.flops is not None
        return faster * self.group.flops / (2 * MATMUL[DEVICE] ** 3)

    def _on_device(self, name: str) -> dict[str, Any]:
        """Measures the GPU's own time: between events, and in a replayed graph. (A backward pass alone cannot be in a
        graph, because its forward pass must be in it.)"""
        if name not in self.device_times:
            return {}
        found: dict[str, Any] = {"device_us": round(statistics.median(self.device_times[name]) * 1e6, 1)}
        if self.group.direction == "backward" or statistics.median(self.device_times[name]) > _GRAPH:
            return found
        few = round(_GRAPH / max(statistics.median(self.device_times[name]), 1e-9))
        runs = [self.prepare[name]() for _ in range(max(1, min(len(self.times[name]), 8, few)))]
        try:
            return found | {"graph_us": round(measure.graph_time(runs) * 1e6, 1)}
        except Exception as error:  # a peer that waits for the GPU, or allocates differently
            torch.cuda.synchronize()
            return found | {"graph_why_not": str(error).strip().splitlines()[0][:200]}
