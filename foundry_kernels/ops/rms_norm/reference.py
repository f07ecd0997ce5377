"""Plain PyTorch, differentiated by autograd: what every kernel of the op must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.dropout import dropout


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_weight: bool) -> Tensor:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    xc = x.contiguous().to(compute)
    y = xc * torch.rsqrt(xc.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    dtype = x.dtype
    if round_before_weight:
        dtype = torch.promote_types(x.dtype, weight.dtype)
        y = y.to(x.dtype).to(compute)
    return (y * (weight.to(compute) + weight_offset)).to(dtype)


def _residual_sum(x: Tensor, residual: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor:
    if dropout_seed is None:
        return (x + residual).contiguous()
    return (dropout(x, dropout_p, dropout_seed) + residual).to(x.dtype).contiguous()


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h = _residual_sum(x, residual, dropout_p, dropout_seed)
    return rms_norm(h, weight, eps, weight_offset, round_before_weight), h


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    xc = x.contiguous().to(compute)
    centered = xc - xc.mean(-1, keepdim=True)
    if compute == torch.float64:  # what others are judged by: as exact as they are where the mean is large
        centered = centered - centered.mean(-1, keepdim=True)
    y = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(compute)
    if bias is not None:
        y = y + bias.to(compute)
    return y.to(x.dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    h = _residual_sum(x, residual, dropout_p, dropout_seed)
    return layer_norm(h, weight, bias, eps), h
