"""What is asked of a module of transformers: whether it is a model, what it takes, who makes its masks."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

#: The arguments of a model that are rows of tokens.
ROWS = frozenset(("input_ids", "inputs_embeds", "decoder_input_ids"))


def models_around(model: nn.Module, modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the models of transformers in `model` that hold one of `modules`."""
    theirs = set(modules)
    return [m for m in model.modules() if is_model(m) and not theirs.isdisjoint(m.modules())]


def holders_of(layers: Iterable[nn.Module], models: Iterable[nn.Module]) -> set[nn.Module]:
    """Returns, for each of `layers`, the innermost of `models` that holds it; a model comes before those in it."""
    theirs = set(layers)
    holder = {module: model for model in models if theirs for module in model.modules() if module in theirs}
    return set(holder.values())


def is_model(module: nn.Module) -> bool:
    cls: Any = type(module)
    return _is_class_of_models(cls)


@functools.cache
def _is_class_of_models(cls: type) -> bool:
    return any(c.__name__ == "PreTrainedModel" and c.__module__.startswith("transformers.") for c in cls.__mro__)


def reads_rows(model: nn.Module) -> bool:
    """Returns whether a model reads rows of tokens, which may hold several documents."""
    return not ROWS.isdisjoint(arguments_of(model))


def goes_on(arguments: tuple[str, ...]) -> bool:
    """Returns whether a model with these arguments goes on with the rows of a model around it."""
    return arguments[:1] == ("hidden_states",) and "attention_mask" in arguments


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """Returns the names of the arguments of a module's forward; none for one that is not Python."""
    try:
        return taken_by(type(module).forward)[1:]
    except (AttributeError, TypeError, ValueError):
        return ()


@functools.cache
def taken_by(function: Callable[..., Any]) -> tuple[str, ...]:
    """Returns the names of the arguments of a function: many modules have the same."""
    return tuple(inspect.signature(function).parameters)


def makes_masks(attention: type) -> bool:
    """Returns whether the family of a class of attention has its masks made by transformers, and so by
    `attention/mask_functions.py`."""
    home = next(c.__module__ for c in attention.__mro__ if "forward" in vars(c))
    return any(
        getattr(value, "__module__", "") == "transformers.masking_utils" and name.startswith("create_")
        for name, value in vars(sys.modules[home]).items()
    )


makes_masks._dynamo_marked_constant = True  # type: ignore[attr-defined]  # the compiler cannot look into it
