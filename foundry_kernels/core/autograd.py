"""Autograd functions under torch.compile."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, also under torch.compile if a tensor is given twice, which the compiler refuses: each
    further time it is given as a view, whose gradient autograd adds."""
    if torch.compiler.is_compiling():
        seen: list[Tensor] = []
        for x in args:
            if isinstance(x, Tensor):
                seen.append(x.view_as(x) if any(x is y for y in seen) else x)
        distinct = iter(seen)
        args = tuple([next(distinct) if isinstance(x, Tensor) else x for x in args])
    return function.apply(*args)
