"""Attention that a class computes by itself: whether its scores can be left out.

Its forward is run on a copy, in which a projection is a choice of columns, so that the copy costs nothing whatever the
module's size. With deferred scores (`adapters/deferred_scores.py`) it must call this package's attention, and compute
no scores; result and gradients must be those of the class. With a mask too, if it takes one. What the deferred scores
do not know they compute, so that another forward is never wrong, but nothing would be gained by it.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import State, names_of
from foundry_kernels.integrations.adapters.deferred_scores import Run, Scores
from foundry_kernels.integrations.adapters.deferred_tensor import Deferred
from foundry_kernels.integrations.adapters.own_attention import ASKING, OwnAttention, deferred
from foundry_kernels.integrations.adapters.rotating import Called, methods_of
from foundry_kernels.integrations.adapters.subclass import make_class
from foundry_kernels.integrations.recognise.reach import LeftError
from foundry_kernels.integrations.recognise.shrink import EMPTY, sizes_of, undisturbed
from foundry_kernels.integrations.recognise.words import is_constant

#: How many tokens a copy gets, and how many numbers a parameter may have that is no projection's.
TOKENS, LARGEST = 5, 1 << 22
#: What a constant of a module is called that says which layer it is.
LAYER = re.compile(r"layer_?(idx|id|index|number)")
TOLERANCE = 1e-5
#: What an argument is called that is a tensor of states.
STATES = re.compile(r"hidden|states|key|value|query|kv|context|memory|source")


class Columns(nn.Module):
    """Stands for a projection: each output is one of the inputs, scaled and moved."""

    def __init__(self, sizes: tuple[int, int, bool], draw: torch.Generator) -> None:
        super().__init__()
        self.in_features, self.out_features, biased = sizes
        self.at = torch.randint(self.in_features, (self.out_features,), generator=draw)
        self.weight = nn.Parameter(_random((self.out_features,), draw))
        self.bias = nn.Parameter(_random((self.out_features,), draw)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        y = x[..., self.at] * self.weight
        return y if self.bias is None else y + self.bias


def own_attention(module: nn.Module, rotations: tuple[Called, ...] = ()) -> OwnAttention | str | None:
    """Returns the adapter of a module whose own forward computes attention, or the reason why it has none; None where
    nothing in its code says that it is attention."""
    cls: Any = type(module)
    if "forward" in vars(module) or not _may_attend(cls) or not any(map(sizes_of, module.children())):
        return None
    key = cls.forward, rotations, _about(module)
    if key not in _KNOWN:
        _KNOWN[key] = _asked(module, rotations)
    return _KNOWN[key]


_KNOWN: dict[Any, OwnAttention | str] = {}


@functools.cache
def _may_attend(cls: Any) -> bool:
    if cls.__module__.startswith(("torch.", "foundry_kernels.")):
        return False
    names = set().union(*(names_of(plain.__code__) for _, plain in methods_of(cls)))
    return "scaled_dot_product_attention" in names or any("softmax" in name.lower() for name in names)


def _about(module: nn.Module) -> Any:
    """Returns all that the answer depends on besides the code."""
    parts = tuple((name, type(part), sizes_of(part), _about(part)) for name, part in module.named_children())
    own = tuple((name, None if x is None else tuple(x.shape)) for name, x in module._parameters.items())
    held = vars(module) | {f"config.{k}": v for k, v in vars(vars(module).get("config", object)).items() if k[0] != "_"}
    constants = (
        (name, str(value)) for name, value in held.items()
        if is_constant(value) and name not in EMPTY and not LAYER.search(name)
    )  # fmt: skip
    return parts, own, tuple(constants)


def _asked(module: nn.Module, rotations: tuple[Called, ...]) -> OwnAttention | str:
    reasons = []
    with undisturbed(), warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        for by_mode in (False, True):
            try:
                return _proved(module, by_mode, rotations)
            except LeftError as error:
                reasons.append(str(error))
            except Exception as error:  # of code that is like none that this package has thought of
                text = (str(error).strip().splitlines() or [""])[0][:120]
                reasons.append(f"a copy of it raises {type(error).__name__}: {text}")
    return reasons[0]


def _proved(module: nn.Module, by_mode: bool, rotations: tuple[Called, ...]) -> OwnAttention:
    draw = torch.Generator().manual_seed(1)
    copied = _copy(module, draw)
    given, theirs = _given(copied, draw)
    first = OwnAttention(rotations=rotations, by_mode=by_mode, weights=None)
    run = Run("reference", fewest=0)
    out = deferred(_patched(copied, first), type(copied)._foundry_computing, first, run, (), given)
    if not run.attended or run.weighed:
        raise LeftError("its weights are none that flash_attention computes, or have another use")
    results = out if type(out) in (tuple, list) else (out,)
    weights = tuple(i for i, x in enumerate(results) if isinstance(x, Scores))
    if 0 in weights or (weights and not _is_asked_for_weights(type(module))):
        raise LeftError("it returns its weights, and nothing tells whether they are asked for")
    if any(isinstance(value, Deferred) for part in copied.modules() for value in vars(part).values()):
        raise LeftError("it keeps its scores")
    ours = replace(first, weights=weights)
    _compare(theirs, _results(_patched(copied, ours), given))
    if "attention_mask" in given:
        hidden = torch.ones(TOKENS, TOKENS).triu(1).double() * torch.finfo(torch.float32).min
        masked = given | {"attention_mask": hidden.expand(2, 1, -1, -1)}
        copied.__class__ = type(module)
        try:
            theirs = _results(copied, masked)
        except Exception:  # it takes masks of another kind
            return ours
        _compare(theirs, _results(_patched(copied, ours), masked))
    return ours


def _is_asked_for_weights(cls: type) -> bool:
    """Returns whether attention of transformers learns whether its weights are asked for: by an argument, or because
    its family has them collected."""
    if not cls.__module__.startswith("transformers."):
        return False
    if any(map(ASKING.search, inspect.signature(cls.forward).parameters)):  # type: ignore[attr-defined]
        return True
    for value in vars(sys.modules[cls.__module__]).values():
        collected = getattr(value, "_can_record_outputs", None)
        for name, found in collected.items() if isinstance(collected, dict) else ():
            for each in found if isinstance(found, (list, tuple)) else (found,):
                kind = getattr(each, "target_class", each)
                if name.endswith("attentions") and isinstance(kind, type) and issubclass(cls, kind):
                    return True
    return False


def _patched(copied: Any, adapter: OwnAttention) -> Any:
    made = make_class(getattr(type(copied), "_foundry_original", type(copied)), adapter)
    copied.__class__, copied._foundry = made, State({"flash_attention": "reference"})
    return copied


def _given(copied: nn.Module, draw: torch.Generator) -> tuple[dict[str, Any], list[Tensor]]:
    """Returns arguments that a copy takes, and its results."""
    width = next(sizes[0] for part in copied.children() if (sizes := sizes_of(part)) is not None)
    named = list(inspect.signature(copied.forward).parameters.values())
    named = [each for each in named if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    failed: list[Exception] = []
    shapes = ((2, TOKENS, width), (2, 2, TOKENS, width))
    for shape, mask in ((shape, mask) for shape in shapes for mask in (None, torch.ones(2, TOKENS))):
        given: dict[str, Any] = {}
        for i, each in enumerate(named):
            if i == 0 or (each.default is each.empty and STATES.search(each.name)):
                given[each.name] = _random(shape, draw)
            elif each.default is each.empty or each.name == "attention_mask":
                given[each.name] = mask if each.default is each.empty and "mask" in each.name else None
        try:
            return given, _results(copied, given)
        except Exception as error:
            failed.append(error)
    raise failed[0]


def _results(module: Any, given: dict[str, Any]) -> list[Tensor]:
    """The result of a call, and the gradients of what it is given and of its parameters."""
    given = {k: x.clone().requires_grad_() if isinstance(x, Tensor) else x for k, x in given.items()}
    row = getattr(module, "_foundry_row", None)
    if row is None:
        y = module.forward(**given)
    else:
        y = deferred(module, module._foundry_computing, row, Run("reference", fewest=0), (), given)
    y = y[0] if type(y) in (tuple, list) else y
    leaves = [x for x in (*given.values(), *module.parameters()) if isinstance(x, Tensor)]
    direction = torch.cos(torch.arange(y.numel(), dtype=torch.float64)).reshape(y.shape)
    found = torch.autograd.grad(y, leaves, direction.to(y.dtype), allow_unused=True)
    return [y.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True))]


def _compare(theirs: list[Tensor], ours: list[Tensor]) -> None:
    scale = max(float(x.abs().max()) for x in theirs[1:])
    for x, y in zip(ours, theirs, strict=True):
        largest = float(y.abs().max()) if y is theirs[0] else scale
        if x.shape != y.shape or not bool(((x - y).abs() <= TOLERANCE * largest).all()):
            raise LeftError("with this package's attention a copy of it computes something else")


def _random(shape: Any, draw: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64, device="cpu")


def _copy(module: nn.Module, draw: torch.Generator) -> Any:
    """A copy in evaluation mode with random parameters in float64 on the CPU; nothing of the module is run."""
    if (sizes := sizes_of(module)) is not None:
        return Columns(sizes, draw)
    cls: Any = type(module)
    copied = cls.__new__(cls)
    nn.Module.__init__(copied)
    vars(copied).update(
        {k: _plain(v) if isinstance(v, Tensor) else v for k, v in vars(module).items() if k not in EMPTY}
    )
    copied.training = False
    for name, x in module._parameters.items():
        shape = None if x is None else getattr(x, "ds_shape", x.shape)
        if shape is not None and math.prod(shape) > LARGEST:
            raise LeftError(f"its parameter {name} is no projection's")
        copied._parameters[name] = None if shape is None else nn.Parameter(_random(tuple(shape), draw))
    copied._buffers.update({name: None if x is None else _plain(x) for name, x in module._buffers.items()})
    copied._modules.update({k: None if part is None else _copy(part, draw) for k, part in module._modules.items()})
    return copied


def _plain(x: Tensor) -> Tensor:
    if x.is_meta:
        x = torch.ones(x.shape, dtype=x.dtype, device="cpu")
    x = x.detach().to("cpu", copy=True)
    return x.double() if x.is_floating_point() else x
