"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.contiguous().to(compute)
    if bias is not None:
        z = z + bias.to(compute)
    return gelu(z, approximate=approximate).to(x.dtype)
