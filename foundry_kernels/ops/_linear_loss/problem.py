"""What a linear loss is: the inputs and options of a call, the kernel over logits, and the names of the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from foundry_kernels.ops._sums import sum_of

#: The `chunk_size` by which "tiles" comes to the operators, and the one of a single chunk, whose gradients are whole.
TILES, ALL = 0, -1
#: Outputs of the forward operator of a loss that can be reduced. The gradients are those of a loss whose own is 1, over
#: `dscale`.
GRADIENTS = ("dscale", "dhidden", "dweight", "dbias", "dlow", "dup")


class Inputs(NamedTuple):
    """low, up: a second pair, ``low @ up.T`` of which is a part of the logits, as of an adapter of the head."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    low: Tensor | None = None
    up: Tensor | None = None


class Needs(NamedTuple):
    """The inputs that get a gradient."""

    hidden: bool
    weight: bool
    bias: bool
    low: bool = False
    up: bool = False


NOTHING = Needs(False, False, False)


class Problem(Protocol):
    """What the options of each linear loss say of its logits and tokens, by fields or by constants of their class."""

    @property
    def ignore_index(self) -> int: ...
    @property
    def reduction(self) -> str: ...
    @property
    def logit_scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def chunk_size(self) -> int | None: ...  # None: one is chosen
    @property
    def batch_invariant(self) -> bool: ...


class Chunk(NamedTuple):
    """Tokens with logits, of all classes or some. part: which of `chunks.Tokens` they are."""

    part: slice
    logits: Tensor
    target: Tensor


class RowKernel:
    """The results of tokens from logits that exist. A loss has a subclass for each backend; an object is for one call.

    Results have the names in `Loss.outputs`.
    """

    #: Whether values may be looked at (see `chunks.Tokens`).
    cpu = False
    #: Whether there are `blocks`. Otherwise tiles use the forward pass of chunks.
    has_blocks = False
    #: The weights of the classes, by which a mean counts the tokens.
    class_weight: Tensor | None = None

    def __init__(self, inputs: Inputs, constants: tuple[Tensor | None, ...], options: Any) -> None:
        self.options, self.n_classes = options, inputs.weight.shape[0]

    def forward(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        """Returns each token's results, those `wanted` at least. With `dloss`, the gradient of each token's loss, the
        logits' own gradient is written over them."""
        raise NotImplementedError

    def gradients_(self, chunk: Chunk, dloss: Tensor, saved: tuple[Tensor, ...], first: int) -> None:
        """Writes over the logits, which are those of the classes from `first` on, their gradient. `saved`: the tokens'
        `Loss.saved`."""
        raise NotImplementedError

    def blocks(self, target: Tensor, wanted: frozenset[str], dtype: torch.dtype) -> Any:
        """An object whose `add(logits, first)` takes the logits of one block of classes after another, and which then
        has the `results`."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Loss:
    """What an operation says of its loss to the engine.

    name: the operation's. options: the class of its options, a `Problem` whose method `results` names the results that
        are requested.
    outputs: of the forward operator, in order. The first is the loss of the tokens. `GRADIENTS` are among them if the
        forward pass makes the gradients of a reduced loss.
    constants: tensors that the operators take after the inputs. They have no gradient.
    flags: by output the flag of the forward operator that requests it.
    saved: results that the backward operator takes.
    reduced: results that are summed or averaged over the tokens. classes: results that are numbers of classes.
    differentiable, rows_of: the results that have a gradient besides the first, and a function of the gradients (None:
        not given) and the values of results by name, which returns the first argument of the backward operator. Without
        it that is the gradient of the loss.
    around: called in place of the function that makes the results, with that function; see `make_backend`.
    logits: how many a token has for each class. tiles: whether there are blocks of classes.
    """

    name: str
    options: Any
    outputs: tuple[str, ...]
    constants: tuple[str, ...] = ()
    flags: Mapping[str, str] = field(default_factory=dict)
    saved: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    differentiable: tuple[str, ...] = ()
    rows_of: Callable[[Mapping[str, Tensor | None], Mapping[str, Tensor]], Tensor] | None = None
    around: Callable[..., dict[str, Tensor]] | None = None
    logits: int = 1
    tiles: bool = True

    #: Whether the forward pass makes gradients; the outputs except `GRADIENTS`; those that the backward pass stores.
    makes_gradients: bool = field(init=False)
    results: tuple[str, ...] = field(init=False)
    kept: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        results = tuple(name for name in self.outputs if name not in GRADIENTS)
        object.__setattr__(self, "makes_gradients", results != self.outputs)
        object.__setattr__(self, "results", results)
        kept = tuple(name for name in results if name in self.saved or name in self.differentiable)
        object.__setattr__(self, "kept", kept)

    def wanted(self, flags: tuple[Any, ...]) -> frozenset[str]:
        """The results that a call of the forward operator returns, from the arguments that follow the options."""
        return frozenset(self.results).difference([n for n, on in zip(self.flags, flags, strict=False) if not on])

    def needs(self, flags: tuple[Any, ...]) -> Needs:
        return Needs(*flags[len(self.flags) :]) if self.makes_gradients else NOTHING


class Call(NamedTuple):
    """One call of an operator. wanted: the results that it returns."""

    loss: Loss
    rows: RowKernel
    inputs: Inputs
    options: Problem
    needs: Needs
    wanted: frozenset[str] = frozenset()


def total_weight(target: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The sum of the weights of the targets that count, of any shape."""
    target = target.reshape(-1)
    counts = target != ignore_index
    if class_weight is None:
        return counts.sum().to(dtype)
    known = counts & (target >= 0) & (target < class_weight.numel())
    return (class_weight.to(dtype).index_select(0, target.masked_fill(~known, 0)) * known).sum()


def mean_of(rows: Tensor, total: Tensor | int) -> Tensor:
    """The sum of `rows` over `total`; where nothing counts 0, unless it is NaN."""
    if isinstance(total, int):
        return sum_of(rows) / max(total, 1)
    nothing, found = total == 0, sum_of(rows)
    return (found / total.masked_fill(nothing, 1.0)).masked_fill(nothing & ~found.isnan(), 0.0)
