"""What is compared with what: the groups of rows that the registry yields, and how each row of a group is called.

A row that cannot be measured (a peer that is not installed or refuses the call, too little memory) carries the reason
in place of figures. A row whose result is not that of the reference carries times and no ratios.
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
from foundry_kernels.core.contract import Bench
from foundry_kernels.core.registry import OpSpec, short_dtype
from foundry_kernels.testing import Case
from foundry_kernels.testing.policy import options_on

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cpu" else (torch.bfloat16,)
OURS = ("triton", "native", "reference")
#: What rows are compared with: a copy of the same bytes into memory that exists, or a matrix product of the same dtype.
LIMITS = ("memcpy", "fresh memcpy", "GEMM")
#: The peer that torch.compile makes where it tries the forms of products that it has, and the mode. CUDA graphs, which
#: write each result over the last, are out: results are kept. See `graph_us` for what graphs give.
SEARCHED, SEARCH = "torch.compile, max-autotune", "max-autotune-no-cudagraphs"
_MODES: dict[str, str | None] = {"torch.compile": None, SEARCHED: SEARCH}
#: Above this many operations a byte a call is compute-bound.
_INTENSITY = 32
#: Sets of inputs that rotate at most; where it would take more to fill the caches, two do and the caches are scrubbed.
MOST_SETS = 64


@dataclass(frozen=True)
class Group:
    """Rows that are compared with each other.

    memory: "warm": the inputs lie in the caches, freed memory is used again; "cold": the inputs rotate over sets that
    do not fit the last-level cache together, freed memory is used again; "fresh" (CPU): as cold, and outputs are new
    memory, for which the system's page faults are paid.
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
        """Whether the shape is timed without --full: the op's BENCH_QUICK holds the endings of the names that are."""
        return self.case.id.endswith(self.bench.BENCH_QUICK)

    @property
    def bench(self) -> Bench:
        assert self.op.bench is not None, f"{self.op.name} is not timed: it has no bench module"
        return self.op.bench

    @property
    def ours(self) -> tuple[str, ...]:
        """Our kernels; the reference where there are none."""
        kernels = tuple(b for b in self.op.backends(DEVICE, self.dtype) if b != "reference")
        return kernels or ("reference",)

    @cached_property
    def peers(self) -> dict[str, Callable[..., Any] | str]:
        """Returns what the op names, torch.compile of "eager", where it may help also as it searches longest, and
        Liger."""
        found = dict(self.bench.peers(self.op.name, self.case, DEVICE))
        if "eager" in found:
            eager, key = found["eager"], (self.op.name, self.case.id, self.dtype)
            for name, mode in _MODES.items():
                if name == SEARCHED and DEVICE == "cpu" and self.flops is None:
                    continue  # on a CPU it searches for products alone
                found[name] = eager if isinstance(eager, str) else _compiled(eager, key, mode)
        if self.case.options.get("dropout_p"):  # its forms have no dropout
            return found
        return found | liger.peers(self.op.name, DEVICE)

    @property
    def limits(self) -> tuple[str, ...]:
        copies = ("memcpy", "fresh memcpy") if self.memory == "fresh" else ("memcpy",)
        return (*copies, "GEMM") if self.limit == "GEMM" else copies

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.ours, *self.peers, *self.limits)

    def chosen(self, full: bool) -> tuple[str, ...]:
        """`names`; the quick set leaves out torch.compile's longest search, the slowest form of attention but for the
        eager one, on a CPU what takes minutes to compile for all shapes of it, and on a GPU the form that takes longer
        than PyTorch's others wherever these take the call."""
        if full:
            return self.names
        slow: tuple[str, ...] = ("SDPA math", "torch.compile", "FlexAttention") if DEVICE == "cpu" else ("SDPA math",)
        if DEVICE != "cpu" and "attn_mask" not in {*self.case.args, *self.case.options}:
            slow += ("SDPA efficient",)
        return tuple(n for n in self.names if n != SEARCHED and (self.flops is None or n not in slow))

    @property
    def limit(self) -> str:
        """Names what bounds the call: "GEMM" or "memcpy"."""
        return "GEMM" if self.flops and self.flops >= _INTENSITY * self.bytes_moved else "memcpy"

    @cached_property
    def bytes_moved(self) -> int:
        return self.bench.bytes_moved(_shapes(self.case, self.dtype), self.direction)

    @cached_property
    def bytes_made(self) -> int:
        """Returns the size of what the call makes: the outputs, or the gradients, or both."""
        args = _shapes(self.case, self.dtype)
        grads = [args[n] for n, a in self.case.args.items() if a is not None and a.grad]
        outputs = self.op.public(**args, **options_on("meta", self.case.options))
        made = {"forward": outputs, "backward": grads, "both": (outputs, grads)}[self.direction]
        return sum(x.nbytes for x in tree_leaves(made) if isinstance(x, Tensor))

    @cached_property
    def flops(self) -> int | None:
        """Returns the FLOPs of the matrix products, None for an operation without."""
        return self.bench.flops(_shapes(self.case, self.dtype), self.case.options, self.direction)

    @property
    def size(self) -> float:
        """Returns the bytes that take as long as the call, roughly."""
        return self.bytes_moved + (self.flops or 0) / _INTENSITY

    def function(self, name: str) -> Callable[..., Any]:
        """Returns what is called with the case's arguments for one of `names` that is no limit."""
        if name in OURS:
            options = options_on(DEVICE, self.case.options)
            return lambda **a: self.op.public(**a, **options, backend=name)
        found = self.peers[name]
        assert not isinstance(found, str), found
        return found


def groups(full: bool, device: str = DEVICE) -> Iterator[Group]:
    """Returns all groups, those of one shape and dtype in succession. The quick ones: forward and backward, of the
    states of memory one on a CPU, and of the shapes those whose names end as the op's BENCH_QUICK says."""
    for op in fk.OPS.values():
        for case in timed_cases(op, device):
            if not full and not Group(op, case, torch.float32, "forward").quick:
                continue
            for dtype in DTYPES if not full or device == "cpu" else (*DTYPES, torch.float32):
                for memory in memories(op, case, dtype, full, device):
                    directions = Group(op, case, dtype, "forward").bench.DIRECTIONS
                    for direction in directions if full else directions[:2]:
                        if direction == "forward" or _takes_gradient(case, full):
                            yield Group(op, case, dtype, direction, memory)


def timed_cases(op: OpSpec, device: str = DEVICE) -> tuple[Case, ...]:
    """Returns the shapes that the op's `bench` module names; none where it has no such module."""
    return () if op.bench is None else op.bench.bench_cases(op.name, device)


def smallest_case(op: OpSpec) -> Case:
    """Returns a case so small that a call is all overhead, with the arguments and options that are benchmarked, if
    any."""

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
    """Returns the states of memory that make a difference to `case`; of the quick set on a CPU one, as the case's
    name says."""
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
    """Returns whether a call is of single tokens: its weights and caches are never in a CPU's or GPU's cache."""
    return "decode" in case.id


def _takes_gradient(case: Case, full: bool) -> bool:
    return any(a is not None and a.grad for a in case.args.values()) and (full or not _decodes(case))


def case_bytes(case: Case, dtype: torch.dtype) -> int:
    """Size of the case's arguments."""
    return sum(math.prod(a.shape) * (a.dtype or dtype).itemsize for a in case.args.values() if a is not None)


def _shapes(case: Case, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """Returns the arguments as meta tensors."""
    return {
        n: None if a is None else torch.empty(a.shape, dtype=a.dtype or dtype, device="meta")
        for n, a in case.args.items()
    }


_compiled_for: tuple[str, str, torch.dtype] | None = None
_compiled_functions: dict[str | None, Callable[..., Any]] = {}


def _compiled(
    eager: Callable[..., Any], key: tuple[str, str, torch.dtype], mode: str | None = None
) -> Callable[..., Any]:
    """torch.compile of `eager`, compiled anew for each `key`: the first shape must not make the next one's dynamic."""

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
    """Returns why the group, or its row `name` in addition, does not fit the free memory, or None. A form that needs
    more than the others may have half of it on any device: it is the slowest, too."""
    more = 0 if name is None else group.bench.peer_bytes(group.case, name)
    return needs_too_much(group_bytes(group) + more, 0.5 if more else None)


#: The part of the memory that is free that is used, by device: a GPU is not shared, and its allocator leaves gaps.
_USED = {"cpu": 0.5, "cuda": 0.9}


def needs_too_much(needed: int, part: float | None = None) -> str | None:
    """Returns the reason not to begin what needs as many bytes, or None. `part` of what is free is used."""
    free, part = free_bytes(DEVICE), _USED[DEVICE] if part is None else part
    if free is None or needed <= part * free:
        return None
    left = "half is left to others" if part == 0.5 else f"{part:.0%} are used"
    return f"needs about {needed / 1e9:.1f} GB, and {free / 1e9:.1f} are free, of which {left}"


def group_bytes(group: Group) -> int:
    """Returns the most that the group holds at a time, roughly, beside what the process holds anyhow."""
    case, sets = group.case, set_count(group)
    given, wide = case_bytes(case, group.dtype), case_bytes(case, torch.float32)
    made = max(group.bytes_moved - given, 0) if group.direction == "forward" else group.bytes_moved
    needed = given * sets + made * (sets + 1)  # inputs in rotation; results that are kept, and their gradients
    needed += 4 * wide  # what eager makes in float32 in between, or saves for its backward pass
    needed += max(group.bytes_moved, 2 * cache_bytes(DEVICE) if group.memory != "warm" else 0)  # of memcpy
    needed += 2 * cache_bytes(DEVICE) if group.memory != "warm" else 0  # scrubs
    needed += CHECKS * checked_bytes(group) + 3 * given  # and a contender's own inputs and gradients
    return needed + group.bench.workspace_bytes(case)


#: What a check holds at a time, of the size of the reference's arguments in float64.
CHECKS = 8


def checked_bytes(group: Group) -> int:
    """Size, in float64, of the arguments that the reference is given."""
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
    # Caches are scrubbed there: of products inputs are a small part, and a backward pass follows its forward pass.
    if group.limit == "GEMM" or group.direction == "backward":
        return 2
    wanted = 2 * cache_bytes(DEVICE) // max(case_bytes(group.case, group.dtype), 1) + 1
    return int(wanted) if wanted <= MOST_SETS else 2


def rotates(group: Group, count: int) -> bool:
    """Returns whether the first of `count` sets of inputs has left the caches once all have been used."""
    return group.memory != "warm" and count * case_bytes(group.case, group.dtype) >= 2 * cache_bytes(DEVICE)
