"""A function of PyTorch's that another one takes the place of, for all callers in a process."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch.nn.functional as F


class Replacement:
    """`own` of `torch.nn.functional`, and `routed`, which takes its place.

    It is replaced in `torch.nn.functional`, where torch's own modules read the name at each call, and by whatever name
    another module has imported it.
    """

    def __init__(self, own: Any, routed: Any) -> None:
        self.own, self.routed = own, routed
        self.replaced: list[tuple[ModuleType, str]] = []

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
