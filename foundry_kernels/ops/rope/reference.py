"""Plain PyTorch, differentiated by autograd: what every kernel of the op must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from foundry_kernels._layout import inverse, storage_order


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    rows = q.shape[2]
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    tables = []
    for table in (cos, sin):
        if positions is not None:
            table = embedding(positions, table)  # an index outside of the table is an error, a negative one too
        elif table.dim() == 2:
            table = table[:rows]
        tables.append((table if table.dim() == 3 else table.unsqueeze(0)).unsqueeze(1).to(compute))
    return _rotate(q, tables[0], tables[1], interleaved), _rotate(k, tables[0], tables[1], interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [B, H, T, D] turned by the angles of cos, sin [B or 1, 1, T, R/2].

    The dimensions are first put in the order that they have in memory: so the output is contiguous in that order, and
    the gradient too.
    """
    order, half = storage_order(x), cos.shape[-1]
    laid, cos, sin = x.permute(order), cos.permute(order), sin.permute(order)
    turned, rest = laid.split([2 * half, laid.shape[-1] - 2 * half], -1)
    one, two = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.split(half, -1)
    one, two = one.to(cos.dtype), two.to(cos.dtype)
    pair = [(one * cos - two * sin).to(x.dtype), (two * cos + one * sin).to(x.dtype)]
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, rest], -1).contiguous().permute(inverse(order))
