"""Plain PyTorch, differentiated by autograd: what every kernel of the operations must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return gelu(_sum(x, bias), approximate=approximate).to(x.dtype)


def bias_silu(x: Tensor, bias: Tensor | None) -> Tensor:
    return silu(_sum(x, bias)).to(x.dtype)


def bias_relu(x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.relu(_sum(x, bias)).to(x.dtype)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    """In the dtype of the arithmetic."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.contiguous().to(compute)
    return z if bias is None else z + bias.to(compute)
