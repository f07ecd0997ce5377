"""Modules that are known by what their code computes, whatever their classes are called.

Code excludes: `reach.py` follows all that the forward of a class reaches, and whatever uses a word that is not in the
vocabulary of the forms (`words.py`) is left. Numbers prove: a small copy with random weights (`shrink.py`) is run
beside the forms (`norms.py`, `mlps.py`), in every dtype, forward and backward, and must equal one of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import REPLACED, Adapter
from foundry_kernels.integrations.recognise import kept
from foundry_kernels.integrations.recognise.mlps import mlp_of
from foundry_kernels.integrations.recognise.norms import norm_of
from foundry_kernels.integrations.recognise.reach import LeftError, Reached
from foundry_kernels.integrations.recognise.shrink import Sizes, copy_of, kind_of, sizes_of, undisturbed
from foundry_kernels.integrations.recognise.words import is_constant
from foundry_kernels.nn._layers import is_observed

#: How many modules a form may hold.
MOST_PARTS = 8


def recognised(module: nn.Module) -> Adapter | str | None:
    """Returns an adapter of `module`, the reason why it has none although its shape is that of a norm or of an MLP, or
    None.

    Nothing of the module's, nor of the process, changes by it.
    """
    if not _may_be_one(module):
        return None
    try:
        if reason := _peculiar(module):
            return reason
        sizes = Sizes(module)
        held = _held(module, sizes)  # or an error, before any code is read
        known = _KNOWN.setdefault(type(module), [])
        for each in known:
            if each.holds(module) and each.key == (held, _read(module, each.paths, sizes)):
                return each.answer
        with undisturbed():
            known.append(_ask(module, sizes, held))
        return known[-1].answer
    except LeftError as error:
        return str(error)
    except Exception as error:  # of code that is like none that this package has thought of
        return f"asking what it computes raises {type(error).__name__}: {error}"


@dataclass(frozen=True)
class _Known:
    """An answer about a class: for these functions, while these names mean what they did, and for modules with this
    key, of the attributes at these paths. It holds nothing of a module."""

    functions: list[FunctionType]
    names: list[tuple[Callable[[], Any], Any]]
    paths: tuple[tuple[str, ...], ...]
    key: Any
    answer: Adapter | str

    def holds(self, module: nn.Module) -> bool:
        same = not self.functions or type(module).forward in self.functions
        return same and all(look() is value for look, value in self.names)


#: What this process knows of each class.
_KNOWN: dict[type, list[_Known]] = {}


def _ask(module: nn.Module, sizes: Sizes, held: Any) -> _Known:
    reached = Reached(module)
    paths = tuple(reached.read)
    key = held, _read(module, paths, sizes)
    if reached.left is not None:
        return _Known(reached.functions, reached.names, paths, key, reached.left)
    name = kept.key_of(reached.functions, key, [value for _, value in reached.names])
    answer = kept.load(name)
    if answer is None:
        try:
            answer = _found(module, reached, sizes)
        except LeftError as error:
            answer = str(error)
        kept.save(name, answer)
    return _Known(reached.functions, reached.names, paths, key, answer)


def _found(module: nn.Module, reached: Reached, sizes: Sizes) -> Adapter:
    takes = _arguments(module)
    small = copy_of(module, sizes, torch.Generator().manual_seed(1))
    if any(part is not None for part in module._modules.values()) and len(takes) == 1:
        return mlp_of(small, reached, takes)
    return norm_of(small, reached, takes)


def _may_be_one(module: nn.Module) -> bool:
    """Returns whether the shape of a module is that of a norm or of an MLP."""
    home = type(module).__module__
    if home.startswith(("torch.", "foundry_kernels.")):
        return False
    parts = [part for part in module._modules.values() if part is not None]
    own = [parameter for parameter in module._parameters.values() if parameter is not None]
    if not parts:
        return len(own) <= 2 and (bool(own) or "norm" in type(module).__name__.lower())
    return len(parts) <= MOST_PARTS and not own and any(sizes_of(part) is not None for part in parts)


def _peculiar(module: nn.Module) -> str | None:
    """Returns what makes a module another one than those of its class, or None."""
    if "forward" in vars(module):
        return REPLACED
    if is_observed(module):
        return "it has hooks"
    if module._buffers:
        return f"it has the buffer {next(iter(module._buffers))}"
    return None


def _arguments(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the inputs of a module's forward.

    Raises:
        LeftError: it takes something else too.
    """
    taken = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if any(each.kind is not each.POSITIONAL_OR_KEYWORD for each in taken) or not taken:
        raise LeftError("it takes other arguments than one tensor")
    if len(taken) > 2 or (len(taken) == 2 and taken[1].name != "gate"):
        raise LeftError(f"it takes {', '.join(each.name for each in taken)}")
    return tuple(each.name for each in taken)


# All that an answer depends on besides the code:


def _held(module: nn.Module, sizes: Sizes) -> Any:
    """Returns what a module holds.

    Raises:
        LeftError: no form holds that.
    """
    shape = tuple((name, p is None) for name, p in module._parameters.items())
    parts = tuple((name, None if part is None else _about(part, sizes)) for name, part in module._modules.items())
    return shape, parts


def _read(module: nn.Module, paths: tuple[tuple[str, ...], ...], sizes: Sizes) -> Any:
    """Returns what is at the paths of attributes that its code reads."""
    return tuple((path, _about(_at(module, path), sizes)) for path in paths)


def _at(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        module = getattr(module, name, None)
    return module


def _about(value: Any, sizes: Sizes) -> Any:
    if is_constant(value):
        value = sizes(value)
        return type(value), tuple(value) if isinstance(value, list) else value
    if isinstance(value, Tensor):
        return sizes(tuple(value.shape))
    if isinstance(value, nn.Module):
        found = kind_of(value)
        if found != "projection":
            return found, type(value)
        layer = sizes_of(value)
        return None if layer is None else (found, sizes(layer[:2]), layer[2])
    return value if callable(value) else type(value)
