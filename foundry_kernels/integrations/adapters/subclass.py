"""The classes of patched modules.

Such a class is a subclass of the module's own, made once for each class and adapter, which overrides one method. It has
no name that pickle and copy could find: they make it again from the original class and the adapter.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters.attention import Attention
from foundry_kernels.integrations.adapters.base import Adapter
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
