"""What is compared with what: the groups of rows that the registry gives, and how each row of a group is called.

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

import foundry_kernels as fk
from benchmarks import liger
from benchmarks.measure import cache_bytes, free_bytes
from foundry_kernels.registry import OpSpec, short_dtype
from foundry_kernels.testing import Arg, Case, assert_parity, run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cpu" else (torch.bfloat16,)
DIRECTIONS = ("forward", "backward", "both")
OURS = ("triton", "native", "reference")
#: What rows are held against: a copy of the same bytes into memory that exists, or a matrix product of the same dtype.
LIMITS = ("copy", "fresh copy", "matmul")
#: Above this many operations a byte a call is limited by arithmetic.
_INTENSITY = 32
#: Sets of inputs that rotate at most; where it would take more to fill the caches, two do and the caches are scrubbed.
MOST_SETS = 64
#: Rows that a check against the reference takes of a larger matrix: it needs several copies in float64.
_CHECKED_ROWS = 2048
#: Root mean square error, relative to the result, up to which a peer computes the same: it need not be exact, as ours.
_SAME = {torch.float32: 1e-3}
_SAME_LOW = 0.05


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
        return self.case.id.endswith(getattr(self.op.cases, "BENCH_QUICK", ("cached", "large")))

    @property
    def ours(self) -> tuple[str, ...]:
        """Our kernels; the reference where there are none."""
        kernels = tuple(b for b in self.op.backends(DEVICE, self.dtype) if b != "reference")
        return kernels or ("reference",)

    @cached_property
    def peers(self) -> dict[str, Callable[..., Any] | str]:
        """The op's table; or, where the options matter to the peers, what it gives for the case. And torch.compile of
        "eager", and Liger."""
        cases = self.op.cases
        found = dict(
            cases.peers(self.op.name, self.case, DEVICE) if hasattr(cases, "peers") else cases.PEERS[self.op.name]
        )
        if "eager" in found:
            eager = found["eager"]
            found["torch.compile"] = eager if isinstance(eager, str) else _compiled(self.op, self.case, self.dtype)
        return found | liger.peers(self.op.name, DEVICE)

    @property
    def limits(self) -> tuple[str, ...]:
        copies = ("copy", "fresh copy") if self.memory == "fresh" else ("copy",)
        return (*copies, "matmul") if self.limit == "matmul" else copies

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.ours, *self.peers, *self.limits)

    def chosen(self, full: bool) -> tuple[str, ...]:
        """`names`; the quick set leaves out what a CPU takes minutes to compile for all shapes of attention, and the
        slowest form of it but for the eager one."""
        if full or DEVICE != "cpu" or self.flops is None:
            return self.names
        return tuple(n for n in self.names if n not in ("torch.compile", "FlexAttention", "SDPA math"))

    @property
    def limit(self) -> str:
        """What bounds the call: "matmul" or "copy"."""
        return "matmul" if self.flops and self.flops >= _INTENSITY * self.bytes_moved else "copy"

    @cached_property
    def bytes_moved(self) -> int:
        return self.op.cases.bytes_moved(_shapes(self.case, self.dtype), self.direction)

    @cached_property
    def flops(self) -> int | None:
        """Of the matrix products, None for an operation without."""
        count = getattr(self.op.cases, "flops", None)
        return None if count is None else count(_shapes(self.case, self.dtype), self.case.options, self.direction)

    def function(self, name: str) -> Callable[..., Any]:
        """What is called with the case's arguments for one of `names` that is no limit."""
        if name in OURS:
            return lambda **a: self.op.public(**a, **self.case.options, backend=name)
        found = self.peers[name]
        assert not isinstance(found, str), found
        return found


def groups(full: bool, device: str = DEVICE) -> Iterator[Group]:
    """All groups, those of one shape and dtype behind each other. The quick ones: forward and backward, no fresh
    memory, and of the shapes those whose names end as the op's BENCH_QUICK says."""
    for op in fk.OPS.values():
        cases = op.cases
        if not hasattr(cases, "bench_cases"):
            continue
        for case in cases.bench_cases(op.name, device):
            if not full and not Group(op, case, torch.float32, "forward").quick:
                continue
            for dtype in DTYPES if not full or device == "cpu" else (*DTYPES, torch.float32):
                for memory in memories(op, case, dtype, full, device):
                    for direction in DIRECTIONS if full else DIRECTIONS[:2]:
                        if direction == "forward" or _takes_gradient(case, full):
                            yield Group(op, case, dtype, direction, memory)


def smallest_case(op: OpSpec) -> Case:
    """A case of so few elements that a call of it is all overhead, of the arguments and options that are benchmarked
    where there are such."""

    def given(case: Case) -> set[str]:
        return {n for n, a in case.args.items() if a is not None}

    plain = [
        c
        for c in op.cases.CASES[op.name]
        if all(a is None or (a.layout == "contiguous" and math.prod(a.shape)) for a in c.args.values())
    ]
    timed = op.cases.bench_cases(op.name, DEVICE) if hasattr(op.cases, "bench_cases") else ()
    if timed:
        alike = [c for c in plain if given(c) == given(timed[0])]
        plain = [replace(c, options=timed[0].options) for c in alike]
    return min(plain, key=lambda c: case_bytes(c, torch.float32))


def memories(op: OpSpec, case: Case, dtype: torch.dtype, full: bool, device: str) -> tuple[str, ...]:
    """The states of memory that make a difference to `case`."""
    if Group(op, case, dtype, "forward").limit == "matmul":
        return ("cold",)
    fits = 2 * case_bytes(case, dtype) <= cache_bytes(device)  # the outputs are about as large as the inputs
    if fits and not _decodes(case):
        return ("warm", "cold")
    return ("cold", "fresh") if device == "cpu" and full and not fits else ("cold",)


def _decodes(case: Case) -> bool:
    """Whether a call is of single tokens: its weights and caches are never in a CPU's or GPU's cache."""
    return "decode" in case.id


def _takes_gradient(case: Case, full: bool) -> bool:
    return any(a is not None and a.grad for a in case.args.values()) and (full or not _decodes(case))


def case_bytes(case: Case, dtype: torch.dtype) -> int:
    """Size of the case's arguments."""
    return sum(math.prod(a.shape) * (a.dtype or dtype).itemsize for a in case.args.values() if a is not None)


def _shapes(case: Case, dtype: torch.dtype) -> dict[str, Tensor | None]:
    """The arguments without memory behind them."""
    return {
        n: None if a is None else torch.empty(a.shape, dtype=a.dtype or dtype, device="meta")
        for n, a in case.args.items()
    }


_compiled_for: tuple[str, str, torch.dtype] | None = None
_compiled_function: Callable[..., Any] | None = None


def _compiled(op: OpSpec, case: Case, dtype: torch.dtype) -> Callable[..., Any]:
    """torch.compile of "eager", compiled anew for each shape: the first one must not make the next one's dynamic."""

    def call(**args: Any) -> Any:
        global _compiled_for, _compiled_function
        key = (op.name, case.id, dtype)
        if _compiled_for != key or _compiled_function is None:
            torch.compiler.reset()
            cases = op.cases
            table = cases.peers(op.name, case, DEVICE) if hasattr(cases, "peers") else cases.PEERS[op.name]
            _compiled_for, _compiled_function = key, torch.compile(table["eager"])
        return _compiled_function(**args)

    return call


# --- checks ---------------------------------------------------------------------------------------------------------


def checked_case(op: OpSpec, case: Case) -> Case:
    """`case`, or a smaller one where the check against the reference would need too much: what the op says, or the
    first rows where all arguments are matrices of as many rows."""
    if hasattr(op.cases, "parity_case"):
        return op.cases.parity_case(case)
    matrices = [a for a in case.args.values() if a is not None and len(a.shape) > 1]
    if not all(len(a.shape) == 2 and a.shape[0] == matrices[0].shape[0] for a in matrices):
        return case

    def cut(a: Arg | None) -> Arg | None:
        return a if a is None or len(a.shape) < 2 else replace(a, shape=(min(a.shape[0], _CHECKED_ROWS), a.shape[1]))

    return replace(case, args={n: cut(a) for n, a in case.args.items()})


_checked: dict[tuple[object, ...], str | None] = {}


def _failed_parity(op: OpSpec, case: Case, dtype: torch.dtype, backend: str) -> str | None:
    """What parity says of the case; asked once for all directions and states of memory."""
    key = (op.name, case.id, dtype, backend)
    if key not in _checked:
        try:
            assert_parity(op, checked_case(op, case), backend=backend, dtype=dtype, device=DEVICE)
            _checked[key] = None
        except AssertionError as error:
            _checked[key] = str(error)
    return _checked[key]


def wrong(group: Group, name: str) -> str | None:
    """Why the row's result is not that of the reference, or None. Ours is held to the parity policy, in outputs and
    gradients; a peer to computing the same, in outputs."""
    if name in LIMITS or name == "reference":
        return None
    if name in OURS:
        return _failed_parity(group.op, group.case, group.dtype, name)
    case = checked_case(group.op, group.case)
    if case.id != group.case.id or case.args != group.case.args:
        return None  # compiled for this shape alone; what it gives there is seen where the shape is small
    with torch.no_grad():
        args = case.make(group.dtype, DEVICE)
        expected = run(group.op, args, case.options, backend="reference").outputs
        got = group.function(name)(**case.make(group.dtype, DEVICE))  # it may write into its own
    for index, (a, r) in enumerate(zip(got if isinstance(got, tuple) else (got,), expected, strict=True)):
        error = float((a.double() - r.double()).square().mean().sqrt())
        size = float(r.double().square().mean().sqrt())
        if not error <= _SAME.get(group.dtype, _SAME_LOW) * size:
            return f"output {index} is not the reference's: root mean square error {error:.2e} of {size:.2e}"
    return None


def too_large(group: Group) -> str | None:
    """Why the group does not fit the free memory, or None."""
    needed = case_bytes(group.case, group.dtype) * (6 + 4 * set_count(group))
    needed += 12 * min(case_bytes(checked_case(group.op, group.case), torch.float64), 2**62)
    needed += getattr(group.op.cases, "workspace_bytes", lambda case: 0)(group.case)
    free = free_bytes(DEVICE)
    if free is None or needed <= free:
        return None
    return f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"


def set_count(group: Group) -> int:
    if group.memory == "warm":
        return 1
    if group.limit == "matmul":  # scrubbed caches do: of these, inputs are a small part
        return 2
    wanted = 2 * cache_bytes(DEVICE) // max(case_bytes(group.case, group.dtype), 1) + 1
    return int(max(wanted, 2)) if wanted <= MOST_SETS else 2


def rotates(group: Group, count: int) -> bool:
    """Whether using `count` sets of inputs by turns leaves nothing of the first in the caches."""
    return group.memory != "warm" and count * case_bytes(group.case, group.dtype) >= 2 * cache_bytes(DEVICE)
