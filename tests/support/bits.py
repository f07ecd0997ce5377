"""Comparison bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal."""
    return a.shape == b.shape and torch.equal(*(x.contiguous().flatten().view(torch.uint8) for x in (a, b)))
