"""``torch.autocast``, which raises when it is asked about the meta device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast casts `x` to. None if autocast is disabled, or if x is float64, which autocast leaves
    alone."""
    device = "cpu" if x.is_cpu else x.device.type
    if device == "meta" or x.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def no_autocast(x: Tensor) -> AbstractContextManager[None]:
    """A block in which autocast is disabled for x's device."""
    device = x.device.type
    return nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
