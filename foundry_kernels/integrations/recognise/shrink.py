"""A small copy of a module: its own class and attributes, other sizes, random weights in float64 on the CPU.

Nothing of the module is run or read but its attributes, so that it may be on the meta device, quantised or sharded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.recognise.reach import LeftError
from foundry_kernels.nn._layers import is_observed

#: Sizes of a copy. Twice one of them, and four times, is none of the others nor twice one of them.
SIZES = (20, 12, 28, 36, 44, 52)
#: What a module has before anything is given to it.
EMPTY = frozenset(vars(nn.Module()))


#: What a layer is called in what is wrapped around it.
WRAPPED = ("base", "base_layer", "module", "_orig_mod", "linear")


class Marked(nn.Module):
    """Stands where a dropout stands, and shows by the result where that is."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.3 * torch.sin((self.number + 1) * x)


def kind_of(child: nn.Module) -> str:
    """Returns what a module inside of another one may be: "dropout", "identity", "projection", which has weights and
    sizes, or "activation", which has no weights.

    Raises:
        LeftError: it is nothing of these.
    """
    if type(child) is nn.Dropout:
        return "dropout"
    if type(child) is nn.Identity:
        return "identity"
    if any(True for _ in child.parameters()):
        if sizes_of(child) is None:
            raise LeftError(f"it holds a {type(child).__name__}, which no form has")
        return "projection"
    if any(True for _ in child.buffers()):
        raise LeftError(f"it holds a {type(child).__name__}, which has buffers")
    if any(map(is_observed, child.modules())):
        raise LeftError(f"its {type(child).__name__} has hooks")
    return "activation"


def sizes_of(layer: Any) -> tuple[int, int, bool] | None:
    """Returns the sizes of the input and the output of a layer that is a matmul, or of what is wrapped in it, and
    whether it has a bias; None where it is no such layer."""
    wrapped = (part for name, part in layer._modules.items() if name in WRAPPED and part is not None)
    for each in (layer, *wrapped):
        held = vars(each)
        if isinstance(held.get("in_features"), int) and isinstance(held.get("out_features"), int):
            return held["in_features"], held["out_features"], getattr(each, "bias", None) is not None
        if (type(each).__module__, type(each).__qualname__) == ("transformers.pytorch_utils", "Conv1D"):
            return held["nx"], held["nf"], True
    return None


class Sizes:
    """Which size of a module becomes which one of its copy; what was twice another size still is."""

    def __init__(self, module: nn.Module) -> None:
        found: set[int] = set()
        for parameter in module._parameters.values():
            if parameter is not None:
                found |= set(getattr(parameter, "ds_shape", parameter.shape))  # whole, where DeepSpeed has it in parts
        for child in module._modules.values():
            if child is not None and (sizes := sizes_of(child)) is not None:
                found |= set(sizes[:2])
        if not found:  # a norm without parameters: what its attributes say
            for value in vars(module).values():
                given = value if isinstance(value, (tuple, list)) else (value,)
                found |= {each for each in given if type(each) is int}
        self.of: dict[int, int] = {}
        free = iter(SIZES)
        for size in sorted(size for size in found if size > 1):
            half = self.of.get(size // 2) if size % 2 == 0 else None
            base = next(free, None) if half is None else 2 * half
            if base is None:
                raise LeftError("it has more sizes than any form has")
            self.of[size] = base

    def __call__(self, value: Any) -> Any:
        """Returns a value, with the sizes in it replaced."""
        if type(value) is int:
            return self.of.get(value, value)
        if isinstance(value, (tuple, list, torch.Size)) and all(type(each) is int for each in value):
            return type(value)(self.of.get(each, each) for each in value)
        return value


def copy_of(module: nn.Module, sizes: Sizes, generator: torch.Generator) -> nn.Module:
    """Returns the copy."""
    cls: Any = type(module)
    copied: nn.Module = cls.__new__(cls)
    nn.Module.__init__(copied)
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            raise LeftError(f"it keeps a tensor, {name}, that is no parameter")
        if name not in EMPTY:
            vars(copied)[name] = sizes(value)
    copied.training = True
    for name, parameter in module._parameters.items():
        shape = None if parameter is None else sizes(tuple(getattr(parameter, "ds_shape", parameter.shape)))
        copied._parameters[name] = None if shape is None else _random(shape, generator)
    dropouts = 0
    for name, child in module._modules.items():
        if child is None:
            copied._modules[name] = None
            continue
        kind = kind_of(child)
        if kind == "dropout":
            copied._modules[name] = Marked(dropouts)
            dropouts += 1
        elif kind == "projection":
            found = sizes_of(child)
            assert found is not None
            copied._modules[name] = _linear(sizes(found[0]), sizes(found[1]), found[2], generator)
        else:
            copied._modules[name] = copy_of(child, sizes, generator)
    return copied


def _random(shape: Any, generator: torch.Generator) -> nn.Parameter:
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    return nn.Parameter(drawn * 0.3 + 0.5 if drawn.dim() < 2 else drawn * 0.4)


def _linear(taken: int, given: int, bias: bool, generator: torch.Generator) -> nn.Linear:
    """A layer whose making draws no random numbers of the process."""
    layer = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(layer)
    layer.in_features, layer.out_features = taken, given
    layer._parameters["weight"] = _random((given, taken), generator)
    layer._parameters["bias"] = _random((given,), generator) if bias else None
    return layer


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """In this block, nothing that the caller has switched on counts: no mode, no autocast, no inference mode."""
    with (
        torch.utils._python_dispatch._disable_current_modes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast("cpu", enabled=False),
    ):
        yield
