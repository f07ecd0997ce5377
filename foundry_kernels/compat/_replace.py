"""Replaces a function of PyTorch for all callers in a process."""

from __future__ import annotations

import importlib
import sys
import threading
from types import ModuleType
from typing import Any, ClassVar, Self

import torch.nn.functional as F


class Replacement:
    """The function `own` of PyTorch's module `home`, and `routed`, which replaces it.

    It is replaced in `home`, where torch's own modules look it up at each call, and under any name in modules that have
    imported it. TorchScript is not routed: it compiles the builtin `own`.
    """

    def __init__(self, own: Any, routed: Any, home: ModuleType = F) -> None:
        self.own, self.routed, self.home = own, routed, home
        self.replaced: list[tuple[ModuleType, str]] = []
        # This is permanent and not part of `put`, because a module that imported `routed` keeps it.
        _name_for_torchscript(own, routed)

    def put(self) -> None:
        # torch's own modules compare functions with what is in torch._C.
        modules = [m for n, m in list(sys.modules.items()) if n.split(".")[0] not in ("torch", "foundry_kernels")]
        for module in (self.home, *modules):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is self.own:
                    setattr(module, name, self.routed)
                    self.replaced.append((module, name))

    def restore(self) -> None:
        for module, name in self.replaced:
            if getattr(module, name, None) is self.routed:  # otherwise it was replaced again
                setattr(module, name, self.own)
        self.replaced.clear()


class Switch:
    """A handle that is active from its creation to `undo`, and a context manager. While any handle of a class is
    active, the function of its `replacement` is replaced."""

    replacement: ClassVar[Replacement]
    active: ClassVar[list[Any]]  # the last one comes last
    _lock = threading.Lock()

    @classmethod
    def changed(cls) -> None:
        """Is called when `active` has changed."""

    def __init__(self) -> None:
        with self._lock:
            if not self.active:
                self.replacement.put()
            self.active.append(self)
            self.changed()

    def undo(self) -> None:
        """Turns this switch off. If no other switch is on, the previous state is restored. Further calls have no
        effect."""
        with self._lock:
            if self not in self.active:
                return
            self.active.remove(self)
            self.changed()
            if not self.active:
                self.replacement.restore()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def _name_for_torchscript(own: Any, routed: Any) -> None:
    """Makes TorchScript, which cannot compile `routed`, treat it as the builtin `own`.

    The table of builtins is private. If another PyTorch has a different one, scripting fails while `routed` is in
    place, and nothing else does.
    """
    try:
        builtins: Any = importlib.import_module("torch.jit._builtins")
        if (name := builtins._find_builtin(own)) is not None:
            builtins._register_builtin(routed, name)
    except (ImportError, AttributeError, TypeError):
        return
