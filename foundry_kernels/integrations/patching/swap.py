"""Changes the class of an instance to a subclass of it, and restores it.

So the module stays the same object with the same parameters, buffers, names, hooks and `isinstance` answers, and
wrappers around it notice nothing.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters.base import Adapter, State
from foundry_kernels.integrations.adapters.subclass import patched_class
from foundry_kernels.integrations.patching.configs import give_back, give_back_outer


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
