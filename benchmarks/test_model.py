"""Whole models: forward pass (with the loss), forward and backward, a training step with AdamW, and generation.

Peak memory is the increase during a run, without weights, optimiser state and other earlier memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks import noise
from benchmarks.budget import LATER, REST, Unit
from benchmarks.conftest import Record
from benchmarks.measure import interleaved, latest, median_ratio, peak_bytes, release, replay, reused_memory
from benchmarks.models import FAMILIES, TINY, ModelContenders, ModelGroup, model_groups, other_loss
from benchmarks.suite import DEVICE
from foundry_kernels.core.registry import short_dtype


def _named(group: ModelGroup, name: str) -> dict[str, Any]:
    row = {"kind": "model", "op": group.family, "row": name, "direction": group.task}
    return row | {"dtype": short_dtype(group.dtype), "case": group.size, "memory": "warm"}


def _timed(group: ModelGroup, times: list[float]) -> dict[str, Any]:
    middle = statistics.median(times)
    return {"median_us": round(middle * 1e6, 1), "tokens/s": round(group.tokens / middle, 1)}


class _Measured:
    def __init__(self, group: ModelGroup, full: bool, fraction: float) -> None:
        self.group = group
        with reused_memory():
            self.contenders = ModelContenders(group)
            prepare = self.contenders.prepare
            seconds, rounds = (8 if full else 2.5) * fraction, max(round(15 * fraction), noise.LEAST)
            # Requests take seconds a round.
            least = 3 if group.task == "requests" and not full else noise.LEAST
            self.times = interleaved(prepare, seconds, rounds, warm_ups=0, least=least) if prepare else {}

    def row(self, name: str) -> dict[str, Any]:
        group, found = self.group, self.contenders
        row = _named(group, name)
        if name in found.why_not:
            return row | {"why_not": found.why_not[name]}
        mine = self.times[name]
        row |= _timed(group, mine)
        with reused_memory():
            row["peak_bytes"] = peak_bytes(found.prepare[name], DEVICE)
        if name in found.wrong:
            return row | {"wrong": found.wrong[name]}
        others = {n: t for n, t in self.times.items() if n != name and n not in found.wrong}
        row["speedup_over"] = {n: round(median_ratio(t, mine), 3) for n, t in others.items()}
        row["noise"] = {n: noise.of_peer(t, mine) for n, t in others.items()}
        return row | {"base": FAMILIES[group.family][0]}


class _Alone:
    """Models that are created, measured and released one after the other, each for its own row."""

    def __init__(self, group: ModelGroup) -> None:
        self.group = group
        self.times: dict[str, list[float]] = {}
        self.loss: float | None = None

    def row(self, name: str) -> dict[str, Any]:
        group = self.group
        row = _named(group, name)
        release()
        found = ModelContenders(group, (name,))
        if name in found.why_not:
            return row | {"why_not": found.why_not[name]}
        prepare = found.prepare[name]
        mine = interleaved({name: prepare}, 2.5, 8, warm_ups=0, least=5, first=2)[name]
        middle = statistics.median(mine)
        row |= _timed(group, mine) | {"peak_bytes": peak_bytes(prepare, DEVICE), "loss": round(found.losses[name], 5)}
        if DEVICE == "cuda":  # weights and the optimiser's moments
            prepare()
            row["held_bytes"] = torch.cuda.memory_allocated()
        self.times[name] = mine
        self.loss = found.losses[name] if self.loss is None else self.loss
        if (problem := other_loss(group, found.losses[name], self.loss)) is not None:
            return row | {"wrong": problem}
        others = {n: statistics.median(t) for n, t in self.times.items() if n != name}
        row |= {"speedup_over": {n: round(t / middle, 3) for n, t in others.items()}, "base": FAMILIES[group.family][0]}
        return row


def unit(params: Mapping[str, Any]) -> Unit:
    group: ModelGroup = params["group"]
    compiled = any("compiled" in name or "max-autotune" in name for name in group.names)
    kind = "compiled model" if compiled and group.task != "forward+backward" else "model"  # compiled for a step already
    size = group.config.n_layers * group.config.dim**2 * group.tokens
    return Unit(group.id, group.id, kind, size, place=LATER if group.task in ("step", "decode") else REST)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    full = bool(metafunc.config.getoption("full", False))
    rows = [pytest.param(g, n, id=f"{g.id}-{n}") for g in model_groups(full) for n in g.names]
    metafunc.parametrize(("group", "name"), rows)


@pytest.mark.benchmark(timer=replay)
def test_model(benchmark: Any, group: ModelGroup, name: str, record: Record) -> None:
    if benchmark.disabled:
        contenders = ModelContenders(replace(group, size=TINY), (name,))
        if name in contenders.why_not:
            pytest.skip(contenders.why_not[name])
        benchmark.pedantic(contenders.prepare[name]())
        return
    measured = latest.get(
        group.id, lambda: _Alone(group) if group.alone else _Measured(group, record.full, record.fraction)
    )
    row = measured.row(name)
    record.absent(row)
    record(benchmark, row, group.id, measured.times[name])
