"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype


def gated_rms_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: str, round_before_weight: bool
) -> Tensor:
    compute = wide_dtype(x.dtype)
    xc, gc = x.contiguous().to(compute), gate.contiguous().to(compute)
    y = xc * torch.rsqrt(xc.square().mean(-1, keepdim=True) + eps)
    if round_before_weight:
        y = y.to(x.dtype).to(compute)
    if weight is not None:
        y = y * weight.to(compute)
    return (y * (F.silu(gc) if activation == "silu" else gc.sigmoid())).to(x.dtype)
