"""Plain PyTorch, differentiated by autograd: what every kernel of the operations must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from foundry_kernels.core.checks import constants
from foundry_kernels.core.dropout import dropout


def swiglu(
    gate: Tensor,
    up: Tensor | None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    interleaved: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> Tensor:
    alpha, up_offset = constants(alpha, up_offset)
    gate32, up32 = _halves(gate, up, interleaved)
    if limit is not None:
        gate32, up32 = _clamp(gate32, None, limit), _clamp(up32, -limit, limit)
    activated = silu(gate32) if alpha == 1.0 else gate32 * torch.sigmoid(alpha * gate32)
    if up_offset != 0.0:
        up32 = up32 + up_offset
    return _result(activated * up32, gate, dropout_p, dropout_seed)


def geglu(
    gate: Tensor, up: Tensor | None, approximate: str, dropout_p: float = 0.0, dropout_seed: Tensor | None = None
) -> Tensor:
    gate32, up32 = _halves(gate, up)
    return _result(gelu(gate32, approximate=approximate) * up32, gate, dropout_p, dropout_seed)


def glu(gate: Tensor, up: Tensor | None, dropout_p: float = 0.0, dropout_seed: Tensor | None = None) -> Tensor:
    gate32, up32 = _halves(gate, up)
    return _result(torch.sigmoid(gate32) * up32, gate, dropout_p, dropout_seed)


def reglu(gate: Tensor, up: Tensor | None, dropout_p: float = 0.0, dropout_seed: Tensor | None = None) -> Tensor:
    gate32, up32 = _halves(gate, up)
    return _result(torch.relu(gate32) * up32, gate, dropout_p, dropout_seed)


def _result(product: Tensor, gate: Tensor, dropout_p: float, dropout_seed: Tensor | None) -> Tensor:
    if dropout_seed is not None:
        product = dropout(product, dropout_p, dropout_seed)
    return product.to(gate.dtype).contiguous()


def _clamp(x: Tensor, low: float | None, high: float) -> Tensor:
    """Passes the gradient of what lies inside of the bounds or at them; `torch.clamp` that at them until 2.13 alone."""
    inside = x <= high if low is None else (x >= low) & (x <= high)
    return torch.where(inside, x, x.detach().clamp(low, high))


def _halves(gate: Tensor, up: Tensor | None, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Gate and up in the dtype of the arithmetic."""
    compute = torch.float64 if gate.dtype == torch.float64 else torch.float32
    if interleaved:
        gate, up = gate[..., ::2], gate[..., 1::2]
    elif up is None:
        half = gate.shape[-1] // 2
        gate, up = gate.split([half, half], -1)
    return gate.to(compute), up.to(compute)
