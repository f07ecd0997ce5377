"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from foundry_kernels.core.registry import wide_dtype


def combine_experts(x: Tensor, weights: Tensor | None, slots: Tensor) -> Tensor:
    compute = wide_dtype(x.dtype)
    none = (slots < 0).unsqueeze(-1)
    if x.shape[0] == 0:  # one row for the slots without any
        x = torch.cat([x, x.new_zeros(1, x.shape[1])])
    if x.shape[1] == 0:  # of rows without elements embedding's gradient reads invalid memory, on a GPU in torch 2.11
        rows = x.to(compute).sum().expand(*slots.shape, 0)
    else:
        rows = embedding(slots.clamp_min(0), x).to(compute).masked_fill(none, 0.0)  # [T, k, D]
    if weights is not None:
        rows = rows * weights.to(compute).unsqueeze(-1).masked_fill(none, 0.0)  # also where 0 * NaN would be
    first, *others = rows.unbind(1)
    for row in others:
        first = first + row
    return first.to(x.dtype)
