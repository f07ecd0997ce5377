"""Every registered operation that has benchmark shapes: our backends, eager, torch.compile, torch's own, and a copy.

`extra_info` of a row holds GB/s (or TFLOP/s), its speed-up over each peer and its time over that of a copy of the same
bytes (medians of rounds in which all took turns), the peak memory of one run and, where there is a backward pass, the
bytes saved for it. The copy writes into a tensor that exists; "fresh copy" into a new one, which on a CPU also pays for
the system's page faults. `reused` rows are measured with freed memory kept by the process.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from benchmarks.measure import Prepare, interleaved, median_ratio, peak_bytes, reused_memory, saved_bytes, timer
from foundry_kernels.registry import OpSpec, short_dtype
from foundry_kernels.testing import Case, assert_parity, make_cotangents

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cpu" else (torch.bfloat16,)
DIRECTIONS = ("forward", "backward", "both")
COPIES = ("copy", "fresh copy")


@dataclass(frozen=True)
class Group:
    """Rows that are compared with each other."""

    op: OpSpec
    case: Case
    dtype: torch.dtype
    direction: str
    memory: str = "fresh"

    @property
    def id(self) -> str:
        reused = "-reused" if self.memory == "reused" else ""
        return f"{self.op.name}-{self.direction}-{short_dtype(self.dtype)}-{self.case.id}{reused}"

    @property
    def names(self) -> tuple[str, ...]:
        ours = tuple(b for b in self.op.backends(DEVICE, self.dtype) if b != "reference")
        peers = self.peers
        return (*ours, *peers, *(("torch.compile",) if "eager" in peers else ()), *COPIES)

    @property
    def peers(self) -> dict[str, Callable[..., Any]]:
        """The op's table; or, where the options matter to the peers, what it gives for the case."""
        cases = self.op.cases
        return cases.peers(self.op.name, self.case, DEVICE) if hasattr(cases, "peers") else cases.PEERS[self.op.name]


def _memories(case: Case) -> tuple[str, ...]:
    """Whether a CPU's small outputs cost page faults is up to the C library's mood; large ones always do."""
    if DEVICE != "cpu":
        return ("fresh",)
    return ("fresh", "reused") if "large" in case.id else ("reused",)


def _groups() -> list[Group]:
    groups = []
    for op in fk.OPS.values():
        if not hasattr(op.cases, "bench_cases"):
            continue
        for case in op.cases.bench_cases(op.name, DEVICE):
            for dtype in DTYPES:
                for memory in _memories(case):
                    groups += [Group(op, case, dtype, direction, memory) for direction in DIRECTIONS]
    return groups


def _functions(group: Group) -> dict[str, Callable[..., Any]]:
    """What is compared, by name: called with the case's arguments."""
    peers = dict(group.peers)
    if "eager" in peers:
        peers["torch.compile"] = torch.compile(peers["eager"])
    for backend in group.names:
        if backend in ("triton", "native"):
            peers[backend] = lambda backend=backend, **a: group.op.public(**a, **group.case.options, backend=backend)
    return peers


def _contenders(group: Group) -> dict[str, Prepare]:
    args = group.case.make(group.dtype, DEVICE)
    functions = _functions(group)
    contenders = {n: _prepare(functions[n], args, group.direction) for n in group.names if n not in COPIES}
    half = torch.randn(group.op.cases.bytes_moved(args, group.direction) // 2 // 4, device=DEVICE)
    into = torch.empty_like(half)
    contenders["copy"] = lambda: lambda: into.copy_(half)
    contenders["fresh copy"] = lambda: half.clone
    return contenders


def _prepare(function: Callable[..., Any], args: dict[str, Tensor | None], direction: str) -> Prepare:
    if direction == "forward":
        plain = {k: None if t is None else t.detach() for k, t in args.items()}

        def forward() -> Any:
            with torch.no_grad():
                return function(**plain)

        return lambda: forward
    wanted = [t for t in args.values() if t is not None and t.requires_grad]

    def outputs() -> tuple[Tensor, ...]:
        out = function(**args)
        return out if isinstance(out, tuple) else (out,)

    cotangents = make_cotangents(outputs(), "contiguous")

    def backward() -> Callable[[], object]:
        out = outputs()
        return lambda: torch.autograd.grad(out, wanted, cotangents)

    return backward if direction == "backward" else lambda: lambda: torch.autograd.grad(outputs(), wanted, cotangents)


_GROUPS = {group.id: group for group in _groups()}


@lru_cache(maxsize=1)  # rows of a group follow each other; its tensors need not outlive it
def _measured(group_id: str) -> tuple[dict[str, Prepare], dict[str, list[float]]]:
    """All contenders of the group, taking turns."""
    torch.compiler.reset()
    contenders = _contenders(_GROUPS[group_id])
    # What fits in a cache is there after a few runs; what does not gains nothing from more than one.
    return contenders, interleaved(contenders, warm_ups=1 if "large" in group_id else 4)


def _rows() -> list[Any]:
    return [pytest.param(g, n, id=f"{g.id}-{n}") for g in _GROUPS.values() for n in g.names]


@pytest.mark.benchmark(timer=timer)
@pytest.mark.parametrize(("group", "name"), _rows())
def test_op(benchmark: Any, group: Group, name: str) -> None:
    if name in ("triton", "native"):  # a kernel that is wrong is not fast
        assert_parity(group.op, group.case, backend=name, dtype=group.dtype, device=DEVICE)
    with reused_memory() if group.memory == "reused" else contextlib.nullcontext():
        contenders, times = _measured(group.id)
        prepare = contenders[name]
        benchmark.group = group.id
        benchmark.pedantic(lambda run: run(), setup=lambda: ((prepare(),), {}), rounds=10, warmup_rounds=1)
        args = group.case.make(group.dtype)
        mine, moved = times[name], group.op.cases.bytes_moved(args, group.direction)
        if hasattr(group.op.cases, "flops"):
            done = group.op.cases.flops(args, group.case.options, group.direction)
            benchmark.extra_info["TFLOP/s"] = round(done / statistics.median(mine) / 1e12, 3)
        benchmark.extra_info.update(
            {
                "op": group.op.name,
                "row": name,
                "direction": group.direction,
                "dtype": short_dtype(group.dtype),
                "case": group.case.id,
                "memory": group.memory,
                "median_us": round(statistics.median(mine) * 1e6, 1),
                "GB/s": round(moved / statistics.median(mine) / 1e9, 2),
                "time_over_copy": round(median_ratio(mine, times["copy"]), 3),
                "speedup_over": {
                    n: round(median_ratio(t, mine), 3) for n, t in times.items() if n not in (*COPIES, name)
                },
                "peak_bytes": peak_bytes(prepare, DEVICE),
                "bytes_moved": moved,
            }
        )
        if group.direction != "forward" and name not in COPIES:
            args = group.case.make(group.dtype, DEVICE)
            benchmark.extra_info["saved_bytes"] = saved_bytes(lambda: _functions(group)[name](**args))
