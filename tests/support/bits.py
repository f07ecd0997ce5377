"""Comparison bit by bit."""

from __future__ import annotations

import torch
from torch import Tensor


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal."""
    return a.shape == b.shape and torch.equal(*(_bytes(x) for x in (a, b)))


def _bytes(x: Tensor) -> Tensor:
    """A single element may have any stride, which `contiguous` keeps."""
    return x.contiguous().as_strided((x.numel(),), (1,)).view(torch.uint8)
