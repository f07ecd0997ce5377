"""Changes the class of an instance, and restores it.

The class is a subclass of the module's own, made once for each class and adapter, which overrides one method. So the
module stays the same object with the same parameters, buffers, names, hooks and `isinstance` answers, wrappers around
it notice nothing, and a patched model can be copied and pickled (the subclass is looked up again from the original
class).
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters.base import Adapter, Attention, State
from foundry_kernels.integrations.patching.configs import give_back, give_back_outer
from foundry_kernels.nn._scripting import refuse_scripting

_CLASSES: dict[tuple[type, Adapter], type] = {}


def patched_class(original: type, adapter: Adapter) -> type:
    """Returns the subclass that instances of `original` are given; always the same one."""
    known = _CLASSES.get((original, adapter))
    if known is None:
        known = _CLASSES[original, adapter] = make_class(original, adapter)
    return known


def make_class(original: type, adapter: Adapter) -> type:
    """Returns a new subclass for instances of `original`."""
    members = {
        "__module__": original.__module__,
        "__doc__": f"{original.__name__} on the operations of foundry_kernels.",
        "__reduce_ex__": _reduce,
        "__prepare_scriptable__": refuse_scripting,
        "_foundry_row": adapter,
        "_foundry_original": original,
        "_foundry_home": sys.modules.get(next(c for c in original.__mro__ if adapter.method in vars(c)).__module__),
        **adapter.members(original),
    }
    # Its name stays too: transformers writes it into saved configs, and trainers find the layers to wrap by it.
    made: Any = type(original.__name__, adapter.bases(original), members)
    made._foundry_class = made  # a class that is derived from it has another
    class_made: type = made
    return class_made


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """The subclass has no name that pickle and copy could find: they go by the original class."""
    _, _, *state = super(self._foundry_class, self).__reduce_ex__(protocol)
    return (_restore, (self._foundry_original, self._foundry_row), *state)


def _restore(original: type, adapter: Adapter) -> nn.Module:
    if isinstance(adapter, Attention):  # whose config names an attention that this process may not know yet
        importlib.import_module("foundry_kernels.integrations.attention.functions")
    made: Any = patched_class(original, adapter)
    module: nn.Module = made.__new__(made)
    return module


def is_patched(module: nn.Module) -> bool:
    return "_foundry" in vars(module)


def apply(module: Any, adapter: Adapter | None, state: State) -> None:
    """Patches `module`; `adapter` is None for one of this package's own modules, whose `backends` are set."""
    if adapter is None:
        state.previous["backends"] = module.backends
        module.backends = state.backends
    else:
        module.__class__ = patched_class(type(module), adapter)
    module._foundry = state


def revert(module: Any) -> None:
    """Undoes `apply`."""
    previous = module._foundry.previous
    if "backends" in previous:
        module.backends = previous["backends"]
    elif _is_last(module):
        module.__class__ = module._foundry_original
    give_back_outer(previous.get("outer", ()))
    if "attention" in previous:
        give_back(previous.get("config") or module.config, previous["attention"])
    del module._foundry


def _is_last(module: nn.Module) -> bool:
    """Returns whether no other class has been derived from the subclass."""
    return getattr(type(module), "_foundry_class", None) is type(module)


def why_not_revertible(module: Any) -> str | None:
    """Returns the reason why `revert` would not give back what was there, or None."""
    if not is_patched(module):
        return "is not patched any more"
    if "backends" in module._foundry.previous or _is_last(module):
        return None
    row: Adapter | None = getattr(module, "_foundry_row", None)
    if row is None or not row.transparent:
        return f"has got the class {type(module).__name__} since (fully_shard does that); undo it first"
    return None
