"""The interface of the modules `cases`, `bench`, `fuzz` and `sharding` in an operation's folder, with defaults.

`cases` is required: the parity suite runs it. An operation without `bench` is not timed. One without `fuzz` gets no
random cases. One without `sharding` runs on DTensors only if torch has a rule of its own. A module must define the
members marked with `@abstractmethod`; for any other member the default here applies. Members are names of the module,
so its functions take no `self`. They are shared by all operations of the folder: `op` is the name of one of them.
"""

from __future__ import annotations

import importlib
import importlib.util
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from foundry_kernels.core.case import Arg, Case

#: The size of the terms that a result sums, by argument (for its gradient) or "output 0", "output 1", ...
Scales = Mapping[str, float]
#: Arguments of a call by name: tensors, or None. For `bench` they are on the meta device: shapes and dtypes without
#: memory. A module knows which of its operation's arguments every call has, so they are not typed as optional.
Tensors = Mapping[str, Any]
Options = Mapping[str, Any]
#: The dimensions of each tensor of an operator's call, one letter each, and the letters along which work is sharded.
Dims = tuple[Mapping[str, str], str]
#: What a call does forward and backward, in bytes or in floating-point operations.
Work = tuple[int, int]
#: Other implementations by name, or the reason why one is not available.
Peers = Mapping[str, Callable[..., Any] | str]


#: The number of rows of a benchmark's result that are checked, if the result has more.
SAMPLED = 256


@dataclass(frozen=True)
class Sample:
    """A sample of the rows of a call. Its result is checked on these if checking all rows would take too long.

    rows: row indices, in order. dims: the dimension that counts rows, by argument. An output with as many dimensions as
    the first of these arguments counts rows in the same dimension. ignored: by argument, the value that excludes the
    other rows from a sum over rows. options: options of the call that differ for these rows.
    """

    rows: Tensor
    dims: Mapping[str, int]
    ignored: Mapping[str, int] = field(default_factory=dict)
    options: Options = field(default_factory=dict)


def sample_rows(case: Case, dims: Mapping[str, int], ignored: Mapping[str, int] | None = None) -> Sample | None:
    """The first, the last and `SAMPLED` - 2 random rows of a call; None if it has no more than `SAMPLED` rows."""
    name, dim = next(iter(dims.items()))
    first = case.args[name]
    assert first is not None
    count = first.shape[dim]
    if count <= SAMPLED:
        return None
    drawn = 1 + torch.randperm(count - 2, generator=torch.Generator().manual_seed(0))[: SAMPLED - 2]
    return Sample(torch.cat([torch.tensor([0, count - 1]), drawn]).sort().values, dims, ignored or {})


@dataclass(frozen=True)
class Saved:
    """What the kernels of an operation save for the backward pass, beside its arguments and two numbers.

    outputs: the indices of outputs that are saved. never: arguments that are not. per_row: by argument, how many
    numbers are saved for each of its rows. gradients: arguments whose gradient the forward pass may have made and saves
    in their place. more: other numbers that are saved, from the arguments and options. made: the numbers that a
    backward pass makes on its way to a gradient.
    """

    outputs: tuple[int, ...] = ()
    never: tuple[str, ...] = ()
    per_row: Mapping[str, int] = field(default_factory=dict)
    gradients: tuple[str, ...] = ()
    more: Callable[[Tensors, Options], int] | None = None
    made: Callable[[Tensors, Options], int] | None = None


class Cases(Protocol):
    """`cases.py`: the calls on which every kernel is compared with the reference, and how exact it must be."""

    @property
    @abstractmethod
    def CASES(self) -> Mapping[str, tuple[Case, ...]]:
        """The parity suite's cases, by operation. They should reach every path of every kernel."""

    @abstractmethod
    def scales(self, args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
        """The size of the terms that a gradient or output sums (float64 inputs without graphs). A result
        that cancels is judged by this size and not by its own. For results that are left out, their own size counts."""

    #: By operation, the arguments that a call overwrites. The suites give each call copies of these, and what it wrote
    #: counts as further results.
    MUTATED: Mapping[str, tuple[str, ...]] = {}

    #: By operation, what kernels save for the backward pass; without an entry arguments alone.
    SAVED: Mapping[str, Saved] = {}

    #: Arguments whose gradient a kernel computes from the rounded output, one number per row. Such a gradient is
    #: allowed one rounding per row, whatever its own dtype and size.
    FROM_OUTPUT: tuple[str, ...] = ()

    def of_output(
        self, options: Options, cotangents: tuple[Tensor, ...], error: Tensor
    ) -> tuple[Options, tuple[Tensor, ...]]:
        """Options and cotangents for which the reference computes the gradients of `FROM_OUTPUT` that belong to an
        output 0 with this `error`. Required if `FROM_OUTPUT` is not empty."""
        raise NotImplementedError

    def why_not(self, case: Case, backend: str, device: str, dtype: torch.dtype | None = None) -> str | None:
        """The reason why a backend does not support a case on "cpu" or "cuda", in a dtype or in any, or None. The suite
        skips unsupported cases."""
        return None

    def compiled_cases(self, op: str) -> tuple[tuple[Case, torch.dtype], ...] | None:
        """What `python -m foundry_kernels inspect` compiles without --all; None for all benchmark and parity cases."""
        return None


class Bench(Protocol):
    """`bench.py`: what is timed, against what, and what it moves and computes."""

    #: Endings of the ids of the cases that are timed without --full.
    BENCH_QUICK: tuple[str, ...] = ("cached", "large")

    #: The directions that are timed for an operation with gradients; without --full only the first two. An operation
    #: whose forward pass computes the gradients has no comparable "backward".
    DIRECTIONS: tuple[str, ...] = ("forward", "backward", "both")

    #: Peers whose results differ, so that only their time is compared: the same call without an option.
    UNCHECKED: tuple[str, ...] = ()

    @abstractmethod
    def bench_cases(self, op: str, device: str) -> tuple[Case, ...]:
        """The shapes to time on "cpu" or "cuda". An id is a shape and words after hyphens, such as "512x2048-cached".
        Cases called "decode" are timed with cold caches only."""

    @abstractmethod
    def peers(self, op: str, case: Case, device: str) -> Peers:
        """Other implementations of the case by name, or the reason why one is not available here. "eager" is also what
        torch.compile is given."""

    def bytes_moved(self, args: Tensors) -> Work | None:
        """The bytes that a call must at least read and write, forward and backward. None: forward the arguments and
        results, backward the arguments, the results' gradients and those of the arguments."""
        return None

    def flops(self, args: Tensors, options: Options) -> Work | None:
        """Floating-point operations of the matmuls; None for an operation without matmuls."""
        return None

    def scaling_cases(self, op: str, device: str) -> Mapping[str, tuple[tuple[int, Case], ...]]:
        """Growing shapes, by the letter of the size that grows: T for tokens or rows, N for the width, V for the
        vocabulary, B for sequences, D for the width of a head, S for keys. The quick set takes the first of them."""
        return {}

    def parity_case(self, case: Case) -> Case:
        """`case`, or a smaller case if the float64 reference would need too much memory: the first 2048 rows of
        matrices that all have the same number of rows."""
        matrices = [a for a in case.args.values() if a is not None and len(a.shape) > 1]
        if not all(len(a.shape) == 2 and a.shape[0] == matrices[0].shape[0] for a in matrices):
            return case

        def cut(a: Arg | None) -> Arg | None:
            return a if a is None or len(a.shape) < 2 else replace(a, shape=(min(a.shape[0], 2048), a.shape[1]))

        return replace(case, args={n: cut(a) for n, a in case.args.items()})

    def sample(self, case: Case) -> Sample | None:
        """The rows on which a result of `case` is checked; None checks all rows. By default they are random rows, if
        the arguments are vectors and matrices with the same number of rows. Dropout depends on the index of a row, so
        with dropout all rows are checked."""
        args = {n: a for n, a in case.args.items() if a is not None and len(a.shape) > 1}
        if case.options.get("dropout_p") or {len(a.shape) for a in args.values()} != {2}:
            return None
        return sample_rows(case, dict.fromkeys(args, 0)) if len({a.shape[0] for a in args.values()}) == 1 else None

    def tokens_made(self, case: Case) -> int | None:
        """The number of tokens that a call generates, for decoding benchmarks; else None."""
        return None

    def workspace_bytes(self, case: Case) -> int:
        """The memory that the check against the reference, or any peer, needs beyond inputs and outputs."""
        return 0

    def peer_bytes(self, case: Case, name: str) -> int:
        """The additional memory that the peer `name` needs. If it does not fit, the row of this peer is left out."""
        return 0


class Fuzz(Protocol):
    """`fuzz.py`: random cases. This needs hypothesis, which only tests use."""

    @abstractmethod
    def random_case(self, op: str) -> Any:
        """A hypothesis strategy of `Case`s: valid calls, with any shape, layout, dtype and options."""


class Sharding(Protocol):
    """`sharding.py`: how DTensor shards the operators of the kernels (`foundry_kernels.distributed.sharding`)."""

    #: Names of the operators. The rule for `name` also applies to `triton_name`, which has the same arguments.
    OPERATORS: tuple[str, ...] = ()

    #: Names of the operators without a rule. They are called with plain tensors only, inside other operators or by
    #: `nn`.
    UNSHARDED: tuple[str, ...] = ()

    #: The dimensions of each tensor, one letter each. A gradient "dx" has the dimensions of "x"; "..." stands for any
    #: number of dimensions.
    DIMS: Mapping[str, str] = {}

    #: The letters along which the work may be sharded.
    ALONG: str = "..."

    def sharding(self, args: Options) -> Dims:
        """`DIMS` and `ALONG` of a call; an operation for which they depend on the call returns its own. By default
        nothing is sharded with dropout: which elements are dropped depends on the number of a row and a column, and a
        device does not know how many come before its own."""
        return {"dropout_seed": "...", **self.DIMS}, self.ALONG if args.get("dropout_seed") is None else ""


Module = TypeVar("Module")


@cache
def load(kind: type[Module], package: str) -> Module | None:
    """The module of an operation's folder that implements `kind`, with defaults for members that it does not define.
    None if there is no such module.

    Raises:
        TypeError: the module lacks a member that it must define.
    """
    name = f"{package}.{kind.__name__.lower()}"
    if importlib.util.find_spec(name) is None:
        return None
    defined = vars(importlib.import_module(name))
    missing = sorted(member for member in kind.__abstractmethods__ if member not in defined)  # type: ignore[attr-defined]
    if missing:
        raise TypeError(f"{name} must define {', '.join(missing)}: see foundry_kernels.core.contract.{kind.__name__}")
    offered = {m: defined[m] for m in members(kind) if m in defined}
    wrapped = {m: staticmethod(value) if callable(value) else value for m, value in offered.items()}
    found: Module = type(kind.__name__, (kind,), wrapped)()
    return found


def members(kind: type) -> tuple[str, ...]:
    """The names that a module may define."""
    return tuple(name for name in vars(kind) if not name.startswith("_"))
