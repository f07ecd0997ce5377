"""Plain PyTorch, differentiated by autograd: what every kernel of the operations must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from foundry_kernels.core.dropout import dropout


def bias_gelu(
    x: Tensor, bias: Tensor | None, approximate: str, dropout_p: float = 0.0, dropout_seed: Tensor | None = None
) -> Tensor:
    return _result(gelu(_sum(x, bias), approximate=approximate), x, dropout_p, dropout_seed)


def bias_silu(x: Tensor, bias: Tensor | None, dropout_p: float = 0.0, dropout_seed: Tensor | None = None) -> Tensor:
    return _result(silu(_sum(x, bias)), x, dropout_p, dropout_seed)


def bias_relu(x: Tensor, bias: Tensor | None, dropout_p: float = 0.0, dropout_seed: Tensor | None = None) -> Tensor:
    return _result(torch.relu(_sum(x, bias)), x, dropout_p, dropout_seed)


def _result(y: Tensor, x: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor:
    if dropout_seed is not None:
        y = dropout(y, dropout_p, dropout_seed)
    return y.to(x.dtype)


def _sum(x: Tensor, bias: Tensor | None) -> Tensor:
    """In the dtype of the arithmetic."""
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    z = x.contiguous().to(compute)
    return z if bias is None else z + bias.to(compute)
