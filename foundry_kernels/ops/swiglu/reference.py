"""Plain PyTorch, differentiated by autograd: what every kernel of the two operations must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


def swiglu(gate: Tensor, up: Tensor | None) -> Tensor:
    gate32, up32 = _halves(gate, up)
    return (silu(gate32) * up32).to(gate.dtype).contiguous()


def geglu(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    gate32, up32 = _halves(gate, up)
    return (gelu(gate32, approximate=approximate) * up32).to(gate.dtype).contiguous()


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gate and up in the dtype of the arithmetic."""
    compute = torch.float64 if gate.dtype == torch.float64 else torch.float32
    if up is None:
        half = gate.shape[-1] // 2
        gate, up = gate.split([half, half], -1)
    return gate.to(compute), up.to(compute)
