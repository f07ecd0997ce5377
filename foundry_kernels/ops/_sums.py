"""Sums over the tokens of a loss."""

import torch
from torch import Tensor


def sum_of(each: Tensor) -> Tensor:
    """On a CPU float32 losses are summed in float64, in C++ too: so a call has the same bits by whichever path it
    takes."""
    if each.device.type == "cpu" and each.dtype == torch.float32:
        return each.sum(dtype=torch.float64).to(torch.float32)
    return each.sum()
