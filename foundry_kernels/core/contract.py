"""What the modules `cases`, `bench`, `fuzz` and `sharding` of an operation's folder may offer, and the defaults.

`cases` must be there: the parity suite runs it. An operation without `bench` is not timed, one without `fuzz` gets no
random cases, one without `sharding` runs on DTensors only where torch has a rule of its own. A member marked with
`@abstractmethod` must be defined in the module; any other may be left out and is then what stands here. All members
are those of the module (a function of the module takes no `self`), for every operation of the folder: `op` is the name
of one of them.
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

#: By argument or "output 0", "output 1", ...: the size of the terms that the result sums.
Scales = Mapping[str, float]
#: Arguments of a call by name. For `bench` they lie on the meta device: shapes and dtypes without memory.
Tensors = Mapping[str, Tensor | None]
Options = Mapping[str, Any]


#: Rows of a benchmark's result that are checked, where it has more.
SAMPLED = 256


@dataclass(frozen=True)
class Sample:
    """Rows of a call on which its result is checked, where all of them would take too long.

    rows: their numbers, in order. dims: by argument, the dimension that counts the rows; outputs with as many
    dimensions as the first of these arguments have it where that one has. ignored: by argument, the value by which the
    other rows take no part in a sum over rows. options: those of the call that are others for these rows alone.
    """

    rows: Tensor
    dims: Mapping[str, int]
    ignored: Mapping[str, int] = field(default_factory=dict)
    options: Options = field(default_factory=dict)


def sample_rows(case: Case, dims: Mapping[str, int], ignored: Mapping[str, int] | None = None) -> Sample | None:
    """The first, the last and `SAMPLED` - 2 random rows of a call, None where it has no more than `SAMPLED`."""
    name, dim = next(iter(dims.items()))
    first = case.args[name]
    assert first is not None
    count = first.shape[dim]
    if count <= SAMPLED:
        return None
    drawn = 1 + torch.randperm(count - 2, generator=torch.Generator().manual_seed(0))[: SAMPLED - 2]
    return Sample(torch.cat([torch.tensor([0, count - 1]), drawn]).sort().values, dims, ignored or {})


class Cases(Protocol):
    """`cases.py`: the calls on which every kernel is compared with the reference, and how exact it must be."""

    @property
    @abstractmethod
    def CASES(self) -> Mapping[str, tuple[Case, ...]]:
        """The parity suite's cases, by operation. They should reach every path of every kernel."""

    @abstractmethod
    def scales(self, args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
        """Size of the terms that a gradient or output sums (float64 inputs): what cancels to nothing is not judged by
        its own size. What is left out has its own size."""

    #: Arguments whose gradient a kernel makes from the output as it was rounded, one number a row: it is judged as so
    #: many roundings as there are rows, whatever its own dtype and size.
    FROM_OUTPUT: tuple[str, ...] = ()

    def of_output(
        self, options: Options, cotangents: tuple[Tensor, ...], error: Tensor
    ) -> tuple[Options, tuple[Tensor, ...]]:
        """Options and cotangents with which the reference's gradients of `FROM_OUTPUT` are those that a kernel makes of
        an output 0 that is off by `error`. Needed where `FROM_OUTPUT` names any."""
        raise NotImplementedError

    def why_not(self, case: Case, backend: str, device: str) -> str | None:
        """The reason why a backend does not support a case on "cpu" or "cuda" that it refuses by name, or None: such a
        case is not tried there."""
        return None

    def compiled_cases(self, op: str) -> tuple[tuple[Case, torch.dtype], ...] | None:
        """What `python -m foundry_kernels inspect` compiles without --all; None for all benchmark and parity cases."""
        return None


class Bench(Protocol):
    """`bench.py`: what is timed, against what, and what it moves and computes."""

    #: Endings of the ids of the cases that are timed without --full.
    BENCH_QUICK: tuple[str, ...] = ("cached", "large")

    #: What is timed of an operation with gradients; without --full the first two. An operation whose forward pass makes
    #: the gradients has no "backward" that could be compared.
    DIRECTIONS: tuple[str, ...] = ("forward", "backward", "both")

    #: Peers whose results are others: what a call takes without an option.
    UNCHECKED: tuple[str, ...] = ()

    @abstractmethod
    def bench_cases(self, op: str, device: str) -> tuple[Case, ...]:
        """The shapes to time on "cpu" or "cuda". An id is a shape, then words behind hyphens: "512x2048-cached"; what
        is called "decode" is timed with cold caches only."""

    @abstractmethod
    def bytes_moved(self, args: Tensors, direction: str) -> int:
        """The least that a call of direction "forward", "backward" or "both" must read and write."""

    @abstractmethod
    def peers(self, op: str, case: Case, device: str) -> Mapping[str, Callable[..., Any] | str]:
        """What else computes the case, by name, or the reason why it cannot here. "eager" is also what torch.compile
        is given."""

    def flops(self, args: Tensors, options: Options, direction: str) -> int | None:
        """Operations of the matrix products; None for an operation without any."""
        return None

    def scaling_cases(self, op: str, device: str) -> Mapping[str, tuple[tuple[int, Case], ...]]:
        """Growing shapes, by the letter of the size that grows: T for tokens or rows, N for the width, V for the
        vocabulary, B for sequences, D for the width of a head, S for keys. The quick set takes the first of them."""
        return {}

    def load_imbalance(self, op: str, case: Case, threads: int) -> float | None:
        """How many times longer so many threads of a CPU take for a forward pass of the native kernel than if its work
        were split evenly and nobody waited; None where it has no rule of its own. See
        `foundry_kernels.testing.schedules`."""
        return None

    def parity_case(self, case: Case) -> Case:
        """`case`, or a smaller one where the reference, in float64, would need too much of a whole one: of matrices
        that all have as many rows the first 2048."""
        matrices = [a for a in case.args.values() if a is not None and len(a.shape) > 1]
        if not all(len(a.shape) == 2 and a.shape[0] == matrices[0].shape[0] for a in matrices):
            return case

        def cut(a: Arg | None) -> Arg | None:
            return a if a is None or len(a.shape) < 2 else replace(a, shape=(min(a.shape[0], 2048), a.shape[1]))

        return replace(case, args={n: cut(a) for n, a in case.args.items()})

    def sample(self, case: Case) -> Sample | None:
        """The rows on which a result of `case` is checked, None for all: random ones where the arguments are matrices
        of as many rows, and vectors. What dropout leaves depends on a row's place, so there it is all of them."""
        args = {n: a for n, a in case.args.items() if a is not None and len(a.shape) > 1}
        if case.options.get("dropout_p") or {len(a.shape) for a in args.values()} != {2}:
            return None
        return sample_rows(case, dict.fromkeys(args, 0)) if len({a.shape[0] for a in args.values()}) == 1 else None

    def tokens_made(self, case: Case) -> int | None:
        """Tokens that a call makes, where that is the figure that matters (decoding)."""
        return None

    def workspace_bytes(self, case: Case) -> int:
        """Memory that the check against the reference, or any peer, needs beyond inputs and outputs."""
        return 0

    def peer_bytes(self, case: Case, name: str) -> int:
        """Memory that the peer `name` alone needs in addition: where it does not fit, its row is left out."""
        return 0

    #: Endings of the ids of cases that are timed before all others, whatever has the time: see `benchmarks.budget`.
    BENCH_FIRST: tuple[str, ...] = ()


class Fuzz(Protocol):
    """`fuzz.py`: random cases. Needs hypothesis, which is for tests only."""

    @abstractmethod
    def random_case(self, op: str) -> Any:
        """A hypothesis strategy of `Case`s: valid calls, with any shape, layout, dtype and options."""


class Sharding(Protocol):
    """`sharding.py`: how DTensor shards the operators of the kernels (`foundry_kernels.distributed.sharding`)."""

    #: Names of the operators: `name` and `triton_name`, which have the same arguments, both follow the rule.
    OPERATORS: tuple[str, ...] = ()

    #: Names of the operators without a rule: they are called with plain tensors alone, inside of others or by `nn`.
    UNSHARDED: tuple[str, ...] = ()

    def sharding(self, args: Mapping[str, Any]) -> tuple[dict[str, str], str]:
        """Returns, for the arguments of one call by name, the dimensions of each tensor, a letter each, and the letters
        along which the work may be sharded. A gradient "dx" has the dimensions of "x"; "..." stands for any number.
        Needed where `OPERATORS` names any."""
        raise NotImplementedError


Module = TypeVar("Module")


@cache
def load(kind: type[Module], package: str) -> Module | None:
    """The module of an operation's folder that offers `kind`, with the defaults for what it leaves out; None if there
    is no such module.

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
    """The names that a module may offer."""
    return tuple(name for name in vars(kind) if not name.startswith("_"))
