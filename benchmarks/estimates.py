"""Estimates the time of a comparison on this machine before it runs: the bytes and matmuls of its calls, divided by the
machine's rates, times the number of calls. `budget.Budget` corrects the estimates by the first measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.budget import FIRST, LATER, REST, Unit
from benchmarks.measure import cache_bytes, timer
from benchmarks.models import REQUESTS, ModelGroup
from benchmarks.noise import LEAST, LEAST_GPU
from benchmarks.rows import LONG, QUICK
from benchmarks.suite import (
    DEVICE,
    LIMITS,
    SEARCHED,
    Group,
    case_bytes,
    checked_bytes,
    memories,
    rotates,
    set_count,
    too_large,
)
from benchmarks.tables import shape_of
from foundry_kernels.core.registry import OpSpec, short_dtype

#: The average time of contenders' calls relative to the machine's limit: with an eager form, which needs several passes
#: over memory; without one; and for matmuls.
_OVER_LIMIT, _FUSED, _PRODUCTS = 4, 2, 1.3
#: Runs of each contender besides the rounds: the first one, warm-up, check, and memory measurements. On a GPU also the
#: runs between events, for calls that are not long.
_RUNS, _RUNS_GPU, _RUNS_LONG = 7, 10, 5
#: Seconds for drawing a gigabyte on a CPU; the fixed time of a row; compiling the forward pass of a function, and a
#: model of two layers; the max-autotune search for a matmul; a row of host time. They vary more than processors differ.
_TOUCH, _ROW, _COMPILE, _COMPILE_MODEL, _SEARCH, _HOST = 1.5, 0.1, 2.0, 25.0, 20.0, 0.3
#: The same on a GPU, which draws the inputs itself, and where a row takes a few milliseconds for delays and a graph.
_TOUCH_GPU, _ROW_GPU, _COMPILE_MODEL_GPU = 0.02, 0.05, 6.0


@dataclass(frozen=True)
class Machine:
    """Bytes a second that a copy reads and writes, and operations a second of a matmul (float32; bfloat16 on a GPU)."""

    copied: float
    products: float
    device: str = DEVICE

    def seconds(self, moved: float, operations: float = 0.0) -> float:
        """Returns the seconds of a call at the machine's limit."""
        return moved / self.copied + operations / self.products


def machine() -> Machine:
    """Measures this machine in less than a second."""
    source, into = torch.ones(2, 2**24, device=DEVICE).unbind()  # 64 MB each
    size, dtype = (1024, torch.float32) if DEVICE == "cpu" else (4096, torch.bfloat16)
    a, b = torch.ones(2, size, size, dtype=dtype, device=DEVICE).unbind()
    copied = 2 * source.nbytes / _best(lambda: into.copy_(source))
    return Machine(copied, 2 * size**3 / _best(lambda: a @ b))


def _best(call: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        start = timer()
        call()
        times.append(timer() - start)
    return max(min(times), 1e-9)


def operation(group: Group, names: Sequence[str], machine: Machine) -> Unit:
    """Returns the estimate for the rows `names` of a group."""
    # The first measurement of a shape waits for torch.compile.
    first = memories(group.op, group.case, group.dtype, not group.quick, DEVICE)[0]
    compiled = "torch.compile" in names and group.memory == first
    fixed, rounds = _times(group, names, machine, QUICK)
    size = machine.seconds(group.bytes_moved, group.flops or 0.0)
    passes = 1 if group.direction == "forward" else 2
    waits = passes * (_COMPILE + (_SEARCH if SEARCHED in names else 0)) if compiled else 0
    shape = f"{group.op.name} {shape_of({'case': group.case.id})}"
    what = f"{group.direction} {short_dtype(group.dtype)}"
    kind = "compiled" if compiled else "operation"
    place = FIRST if group.bench.BENCH_FIRST and group.case.id.endswith(group.bench.BENCH_FIRST) else REST
    return Unit(group.id, shape, kind, fixed + waits, rounds, size, group.op.name, what, place, waits=waits)


def _times(group: Group, names: Sequence[str], machine: Machine, effort: tuple[float, int]) -> tuple[float, float]:
    """The seconds outside of the rounds, and the seconds of all rounds."""
    gpu = machine.device != "cpu"
    names = [n for n in names if not group.bench.peer_bytes(group.case, n) or too_large(group, n) is None]
    count = sum(n not in LIMITS for n in names)
    over: float = _OVER_LIMIT if "eager" in names else _FUSED
    if group.limit == "GEMM" and not group.bench.peer_bytes(group.case, "eager"):
        over = _PRODUCTS
    call = over * machine.seconds(group.bytes_moved, group.flops or 0.0) + 50e-6
    if group.direction == "backward":  # after an untimed forward pass
        before = replace(group, direction="forward")
        call += over * machine.seconds(before.bytes_moved, before.flops or 0.0)
    sets = set_count(group)
    scrubbed = group.memory != "warm" and not (group.direction != "backward" and rotates(group, sets))
    scrub = machine.seconds(2 * cache_bytes(DEVICE)) if scrubbed else 0
    warm_ups = 4 if group.memory == "warm" else 0
    a_round = count * call * (1 + warm_ups) + len(names) * scrub
    rounds = a_round * min(effort[1], max(LEAST_GPU if gpu else LEAST, math.ceil(effort[0] / a_round)))
    used = sets if group.memory == "cold" and group.limit == "memcpy" else 0
    made = case_bytes(group.case, group.dtype) * sets + 2 * cache_bytes(DEVICE) * (group.memory != "warm")
    checked = checked_bytes(group)
    runs, touch, a_row = (
        (_RUNS_GPU if call <= LONG else _RUNS_LONG, _TOUCH_GPU, _ROW_GPU) if gpu else (_RUNS, _TOUCH, _ROW)
    )
    fixed = len(names) * a_row + count * call * (runs + used) + (made + 4 * checked) / 1e9 * touch
    return fixed, rounds


def growth(name: str, shape: str, groups: Sequence[Group], machine: Machine) -> Unit:
    """Returns the estimate for all sizes along an axis; `groups` has one group for each size."""
    fixed = rounds = 0.0
    for group in groups:
        names = [n for n in group.names if n not in ("torch.compile", SEARCHED, "eager")]
        more = _times(group, names, machine, (0.2, 7))
        fixed, rounds = fixed + more[0], rounds + more[1]
    size = max(machine.seconds(g.bytes_moved, g.flops or 0.0) for g in groups)
    return Unit(name, shape, "growth", fixed, rounds, size)


def model(group: ModelGroup, machine: Machine) -> Unit:
    """Returns the estimate for the models of a task. A compiled model of a step is also used for both passes."""
    c, trains = group.config, group.task in ("forward+backward", "step")
    parameters = c.n_layers * c.dim * (2 * c.dim + 3 * c.ffn_width) + 2 * c.vocab_size * c.dim
    call = machine.seconds(0, 2 * parameters * group.tokens * (3 if trains else 1)) * 2 + 1e-3 * c.n_layers
    call *= group.tokens if group.task == "decode" else 1
    if group.task == "requests":
        steps = machine.seconds(4 * parameters, 0) + 1e-3 * c.n_layers  # each reads the weights
        call = machine.seconds(0, 2 * parameters * sum(REQUESTS)) * 2 + group.tokens * steps
    compiled = sum("compiled" in n or "max-autotune" in n for n in group.names)
    compiled *= group.task != "forward+backward"
    compiling = _COMPILE_MODEL if machine.device == "cpu" else _COMPILE_MODEL_GPU
    fixed = len(group.names) * (0.5 + 3 * call) + compiled * compiling * c.n_layers / 2
    rounds = max(2.5, (3 if group.task == "requests" else LEAST) * len(group.names) * call)
    kind = "compiled model" if compiled else "model"
    place = LATER if group.task in ("step", "decode") else REST
    return Unit(group.id, group.id, kind, fixed, rounds, fixed + rounds, place=place)


def overhead(op: OpSpec, kind: str) -> Unit:
    """Returns the estimate for the host time of an operation."""
    return Unit(f"{op.name}-{kind}", f"{op.name} {kind}", "overhead", 0.0, place=LATER, a_row=_HOST)
