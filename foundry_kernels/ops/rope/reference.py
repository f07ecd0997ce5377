"""Plain PyTorch, differentiated by autograd: what every kernel of the two operations must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding

from foundry_kernels.core.layout import inverse, storage_order


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    cos, sin = _tables(q, cos, sin, positions)
    return _in_memory_order(q, _rotate, cos, sin, interleaved), _in_memory_order(k, _rotate, cos, sin, interleaved)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    interleaved: bool,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    cos, sin = _tables(q, cos, sin, positions)

    def normalize_and_rotate(x: Tensor, cos: Tensor, sin: Tensor, weight: Tensor | None) -> Tensor:
        wide = x.to(cos.dtype)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if round_before_weight:
            wide = wide.to(x.dtype).to(cos.dtype)
        if weight is not None:
            wide = wide * (weight.to(cos.dtype) + weight_offset)
        return _rotate(wide, cos, sin, interleaved).to(x.dtype)

    return (
        _in_memory_order(q, normalize_and_rotate, cos, sin, q_weight),
        _in_memory_order(k, normalize_and_rotate, cos, sin, k_weight),
    )


def _tables(q: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
    """cos, sin ``[B or 1, 1, T, R/2]`` of q's tokens, in the dtype of the arithmetic."""
    rows = q.shape[2]
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    tables = []
    for table in (cos, sin):
        if positions is not None:
            table = embedding(positions, table)  # an index outside the table is an error, a negative one too
        elif table.dim() == 2:
            table = table[:rows]
        tables.append((table if table.dim() == 3 else table.unsqueeze(0)).unsqueeze(1).to(compute))
    return tables[0], tables[1]


def _in_memory_order(x: Tensor, function: Any, cos: Tensor, sin: Tensor, option: Any) -> Tensor:
    """``function(x, cos, sin, option)`` of x ``[B, H, T, D]`` and the tables, all permuted to x's storage order, so
    that output and gradient are dense in that order."""
    order = storage_order(x)
    out = function(x.permute(order), cos.permute(order), sin.permute(order), option)
    return out.contiguous().permute(inverse(order))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    pairs, rest = x.split([2 * half, x.shape[-1] - 2 * half], -1)
    one, two = pairs.unflatten(-1, (half, 2)).unbind(-1) if interleaved else pairs.split([half, half], -1)
    one, two = one.to(cos.dtype), two.to(cos.dtype)
    pair = [(one * cos - two * sin).to(x.dtype), (two * cos + one * sin).to(x.dtype)]
    rotated = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([rotated, rest], -1)
