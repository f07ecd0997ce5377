"""A function of PyTorch's that another one takes the place of, for all callers in a process."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import torch.nn.functional as F


class Replacement:
    """`own` of `torch.nn.functional`, and `routed`, which takes its place.

    It is replaced in `torch.nn.functional`, where torch's own modules read the name at each call, and by whatever name
    another module has imported it. TorchScript is not routed: it compiles the builtin that `own` is.
    """

    def __init__(self, own: Any, routed: Any) -> None:
        self.own, self.routed = own, routed
        self.replaced: list[tuple[ModuleType, str]] = []
        # For good, and not by `put`: a module that imported `routed` meanwhile keeps it.
        _name_for_torchscript(own, routed)

    def put(self) -> None:
        # torch's own modules compare functions with what is in torch._C.
        modules = [m for n, m in list(sys.modules.items()) if n.split(".")[0] not in ("torch", "foundry_kernels")]
        for module in (F, *modules):
            for name, value in list(getattr(module, "__dict__", {}).items()):
                if value is self.own:
                    setattr(module, name, self.routed)
                    self.replaced.append((module, name))

    def restore(self) -> None:
        for module, name in self.replaced:
            if getattr(module, name, None) is self.routed:  # else somebody replaced it since: it is theirs
                setattr(module, name, self.own)
        self.replaced.clear()


def _name_for_torchscript(own: Any, routed: Any) -> None:
    """TorchScript, which could not compile `routed`, takes it for the builtin `own`.

    Its table is private: in a PyTorch that has another, scripting fails while `routed` is put, and nothing else does.
    """
    try:
        builtins: Any = importlib.import_module("torch.jit._builtins")
        if (name := builtins._find_builtin(own)) is not None:
            builtins._register_builtin(routed, name)
    except (ImportError, AttributeError, TypeError):
        return
