"""Defines the comparisons: groups of rows from the registry, and how to call each row.

A row that cannot be measured (a peer is not installed or refuses the call, too little memory) has a reason in place of
figures. A row with a wrong result has times but no ratios.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import foundry_kernels as fk
from benchmarks import liger
from benchmarks.measure import cache_bytes, free_bytes
from benchmarks.tables import LIMITS as LIMITS
from benchmarks.tables import OURS as OURS
from foundry_kernels.core.contract import Bench, Work
from foundry_kernels.core.registry import OpSpec, short_dtype
from foundry_kernels.testing import Case
from foundry_kernels.testing.policy import options_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cpu" else (torch.bfloat16,)
#: The peer for which torch.compile tries all its forms of matmuls, and the mode. It does not use CUDA graphs, which
#: overwrite the previous result, because results are kept. `graph_us` has the times in graphs.
SEARCHED, SEARCH = "torch.compile, max-autotune", "max-autotune-no-cudagraphs"
_MODES: dict[str, str | None] = {"torch.compile": None, SEARCHED: SEARCH}
#: With more operations a byte, a call is compute-bound.
_INTENSITY = 32
#: The maximum number of rotating sets of inputs. If more would be needed to fill the caches, there are two sets and the
#: caches are scrubbed.
MOST_SETS = 64


@dataclass(frozen=True)
class Group:
    """Rows that are compared with each other.

    memory: "warm": the inputs are in the caches, and freed memory is reused; "cold": the inputs rotate over sets that
    do not fit the last-level cache together, and freed memory is reused; "fresh" (CPU): as cold, but outputs are new
    memory with page faults.
    """

    op: OpSpec
    case: Case
    dtype: torch.dtype
    direction: str
    memory: str = "cold"

    @property
    def id(self) -> str:
        return f"{self.op.name}-{self.direction}-{short_dtype(self.dtype)}-{self.case.id}-{self.memory}"

    @property
    def quick(self) -> bool:
        """Whether the shape is timed without --full: BENCH_QUICK of the op has the endings of these names."""
        return self.case.id.endswith(self.bench.BENCH_QUICK)

    @property
    def bench(self) -> Bench:
        assert self.op.bench is not None, f"{self.op.name} is not timed: it has no bench module"
        return self.op.bench

    @property
    def ours(self) -> tuple[str, ...]:
        """This package's kernels, or the reference if there are none."""
        kernels = tuple(b for b in self.op.backends(DEVICE, self.dtype) if b != "reference")
        return kernels or ("reference",)

    @cached_property
    def peers(self) -> dict[str, Callable[..., Any] | str]:
        """Returns the op's peers, torch.compile of "eager", also with its longest search if this may help, and
        Liger."""
        found = dict(self.bench.peers(self.op.name, self.case, DEVICE))
        if "eager" in found:
            eager, key = found["eager"], (self.op.name, self.case.id, self.dtype)
            for name, mode in _MODES.items():
                if name == SEARCHED and DEVICE == "cpu" and self.flops is None:
                    continue  # on a CPU it only searches for matmuls
                found[name] = eager if isinstance(eager, str) else _compiled(eager, key, mode)
        if self.case.options.get("dropout_p"):  # its functions have no dropout
            return found
        return found | liger.peers(self.op.name, DEVICE, self.case)

    @property
    def limits(self) -> tuple[str, ...]:
        copies = ("memcpy", "fresh memcpy") if self.memory == "fresh" else ("memcpy",)
        return (*copies, "GEMM") if self.limit == "GEMM" else copies

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.ours, *self.peers, *self.limits)

    def chosen(self, full: bool) -> tuple[str, ...]:
        """`names`. The quick set omits torch.compile's longest search and the slowest form of attention except the
        eager one; on a CPU also peers that take minutes to compile for all shapes, and on a GPU a form that is slower
        than PyTorch's others if these support the call."""
        if full:
            return self.names
        slow: tuple[str, ...] = ("SDPA math", "torch.compile", "FlexAttention") if DEVICE == "cpu" else ("SDPA math",)
        if DEVICE != "cpu" and "attn_mask" not in {*self.case.args, *self.case.options}:
            slow += ("SDPA efficient",)
        return tuple(n for n in self.names if n != SEARCHED and (self.flops is None or n not in slow))

    @property
    def limit(self) -> str:
        """The name of the call's limit: "GEMM" or "memcpy"."""
        return "GEMM" if self.flops and self.flops >= _INTENSITY * self.bytes_moved else "memcpy"

    @cached_property
    def bytes_moved(self) -> int:
        args = _shapes(self.case, self.dtype)
        if (moved := self.bench.bytes_moved(args)) is None:
            outputs, grads = self._made
            once = _bytes(args) + outputs
            moved = once, once + grads
        return self._in_direction(moved)

    @cached_property
    def bytes_made(self) -> int:
        """Returns the size of the call's results: the outputs, or the gradients, or both."""
        return self._in_direction(self._made)

    @cached_property
    def flops(self) -> int | None:
        """Returns the FLOPs of the matmuls; None for an operation without matmuls."""
        done = self.bench.flops(_shapes(self.case, self.dtype), self.case.options)
        return None if done is None else self._in_direction(done)

    @cached_property
    def _made(self) -> Work:
        """The bytes of the outputs and of the gradients."""
        args = _shapes(self.case, self.dtype)
        grads = [args[n] for n, a in self.case.args.items() if a is not None and a.grad]
        outputs = self.op.public(**args, **options_on("meta", self.case.options))
        return _bytes(outputs), _bytes(grads)

    def _in_direction(self, work: Work) -> int:
        return {"forward": work[0], "backward": work[1], "both": sum(work)}[self.direction]

    @property
    def size(self) -> float:
        """Returns the bytes that take as long as the call, roughly."""
        return self.bytes_moved + (self.flops or 0) / _INTENSITY

    def function(self, name: str) -> Callable[..., Any]:
        """Returns the function for one of `names` (not a limit); it takes the case's arguments."""
        if name in OURS:
            options = options_on(DEVICE, self.case.options)
            return lambda **a: self.op.public(**a, **options, backend=name)
        found = self.peers[name]
        assert not isinstance(found, str), found
        return found


def groups(full: bool, device: str = DEVICE) -> Iterator[Group]:
    """Yields all groups; those of one shape and dtype follow each other. The quick set has forward and backward, one
    state of memory on a CPU, and the shapes whose names have an ending of the op's BENCH_QUICK."""
    for op in fk.OPS.values():
        for case in timed_cases(op, device):
            if not full and not Group(op, case, torch.float32, "forward").quick:
                continue
            for dtype in DTYPES if not full or device == "cpu" else (*DTYPES, torch.float32):
                for memory in memories(op, case, dtype, full, device):
                    directions = Group(op, case, dtype, "forward").bench.DIRECTIONS
                    for direction in directions if full else directions[:2]:
                        if direction == "forward" or takes_gradient(case, full):
                            yield Group(op, case, dtype, direction, memory)


def timed_cases(op: OpSpec, device: str = DEVICE) -> tuple[Case, ...]:
    """Returns the shapes of the op's `bench` module; none without such a module."""
    return () if op.bench is None else op.bench.bench_cases(op.name, device)


def smallest_case(op: OpSpec) -> Case:
    """Returns a case so small that a call is only overhead, with the arguments and options of benchmarks, if any."""

    def given(case: Case) -> set[str]:
        return {n for n, a in case.args.items() if a is not None}

    plain = [
        c
        for c in op.cases.CASES[op.name]
        if all(a is None or (a.layout == "contiguous" and math.prod(a.shape)) for a in c.args.values())
    ]
    if timed := timed_cases(op):
        alike = [c for c in plain if given(c) == given(timed[0])]
        plain = [replace(c, options=timed[0].options) for c in alike]
    return min(plain, key=lambda c: case_bytes(c, torch.float32))


def memories(op: OpSpec, case: Case, dtype: torch.dtype, full: bool, device: str) -> tuple[str, ...]:
    """Returns the states of memory that matter for `case`; in the quick set on a CPU only one, according to the case's
    name."""
    group = Group(op, case, dtype, "forward")
    if group.limit == "GEMM":
        return ("cold",)
    fits = 2 * case_bytes(case, dtype) <= cache_bytes(device)  # the outputs are about as large as the inputs
    if device == "cpu" and group.quick and not full:
        return ("warm",) if fits and case.id.endswith("cached") else ("cold",)
    if fits and not _decodes(case):
        return ("warm", "cold")
    return ("cold", "fresh") if device == "cpu" and full and not fits else ("cold",)


def _decodes(case: Case) -> bool:
    """Returns whether a call decodes single tokens. In models, its weights and key-value caches are never in the
    processor's caches."""
    return "decode" in case.id


def takes_gradient(case: Case, full: bool) -> bool:
    return any(a is not None and a.grad for a in case.args.values()) and (full or not _decodes(case))


def case_bytes(case: Case, dtype: torch.dtype) -> int:
    """Size of the case's arguments."""
    return sum(math.prod(a.shape) * a.dtype_in(dtype).itemsize for a in case.args.values() if a is not None)


def _bytes(tensors: Any) -> int:
    return sum(x.nbytes for x in tree_leaves(tensors) if isinstance(x, Tensor))


def _shapes(case: Case, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Returns the arguments as meta tensors."""
    return {
        n: None if a is None else torch.empty(a.shape, dtype=a.dtype_in(dtype), device="meta")
        for n, a in case.args.items()
    }


_compiled_for: tuple[str, str, torch.dtype] | None = None
_compiled_functions: dict[str | None, Callable[..., Any]] = {}


def _compiled(
    eager: Callable[..., Any], key: tuple[str, str, torch.dtype], mode: str | None = None
) -> Callable[..., Any]:
    """torch.compile of `eager`, compiled separately for each `key`, so that a second shape does not become dynamic."""

    def call(**args: Any) -> Any:
        global _compiled_for
        if _compiled_for != key:
            torch.compiler.reset()
            _compiled_for = key
            _compiled_functions.clear()
        if mode not in _compiled_functions:
            _compiled_functions[mode] = torch.compile(eager, mode=mode)
        return _compiled_functions[mode](**args)

    return call


# --- memory -----------------------------------------------------------------------------------------------------------


def too_large(group: Group, name: str | None = None) -> str | None:
    """Returns why the group, or additionally its row `name`, does not fit the free memory, or None. A form that needs
    more than the others may use half of it on any device; it is also the slowest."""
    more = 0 if name is None else group.bench.peer_bytes(group.case, name)
    return needs_too_much(group_bytes(group) + more, 0.5 if more else None)


#: The fraction of the free memory to use, by device. A GPU is not shared, and its allocator leaves gaps.
_USED = {"cpu": 0.5, "cuda": 0.9}


def needs_too_much(needed: int, part: float | None = None) -> str | None:
    """Returns the reason why `needed` bytes are too many, or None. `part` of the free memory may be used."""
    free, part = free_bytes(DEVICE), _USED[DEVICE] if part is None else part
    if free is None or needed <= part * free:
        return None
    left = "half is left to others" if part == 0.5 else f"{part:.0%} are used"
    return f"needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free, of which {left}"


def group_bytes(group: Group) -> int:
    """Returns roughly the maximum of additional memory that the group needs."""
    case, sets = group.case, set_count(group)
    given, wide = case_bytes(case, group.dtype), case_bytes(case, torch.float32)
    made = max(group.bytes_moved - given, 0) if group.direction == "forward" else group.bytes_moved
    needed = given * sets + made * (sets + 1)  # rotating inputs; kept results, and their gradients
    needed += 4 * wide  # eager's float32 intermediates, or saved tensors
    needed += max(group.bytes_moved, 2 * cache_bytes(DEVICE) if group.memory != "warm" else 0)  # of memcpy
    needed += 2 * cache_bytes(DEVICE) if group.memory != "warm" else 0  # scrubs
    needed += CHECKS * checked_bytes(group) + 3 * given  # and a contender's own inputs and gradients
    return needed + group.bench.workspace_bytes(case)


#: The memory of a check, in multiples of the reference's float64 arguments.
CHECKS = 8


def checked_bytes(group: Group) -> int:
    """The size of the reference's arguments in float64."""
    size, sample = case_bytes(group.case, torch.float64), group.bench.sample(group.case)
    if sample is None:
        return size
    for name, dim in sample.dims.items():
        a = group.case.args[name]
        assert a is not None
        in_a_row = math.prod(a.shape) // a.shape[dim] * (a.dtype or torch.float64).itemsize
        size -= in_a_row * (a.shape[dim] - len(sample.rows))
    return size


def set_count(group: Group) -> int:
    if group.memory == "warm":
        return 1
    # Caches are scrubbed there, because a matmul's inputs are small, and a backward pass follows its forward pass.
    if group.limit == "GEMM" or group.direction == "backward":
        return 2
    wanted = 2 * cache_bytes(DEVICE) // max(case_bytes(group.case, group.dtype), 1) + 1
    return int(wanted) if wanted <= MOST_SETS else 2


def rotates(group: Group, count: int) -> bool:
    """Returns whether the first of `count` sets of inputs is out of the caches after all were used."""
    return group.memory != "warm" and count * case_bytes(group.case, group.dtype) >= 2 * cache_bytes(DEVICE)
