"""What the operators are called with and what they return, under names; and what every strategy needs of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None


class Needs(NamedTuple):
    """The inputs that get a gradient."""

    hidden: bool
    weight: bool
    bias: bool


class Saves(NamedTuple):
    """What the forward pass returns beside the loss. stats: lse with what its rounding took, for a backward pass."""

    lse: bool
    z_loss: bool
    stats: bool


class Outputs(NamedTuple):
    """The outputs of the forward pass. The gradients are those of a loss whose own is 1, over `dscale`. Empty: not
    asked for."""

    loss: Tensor
    lse: Tensor
    lse_low: Tensor
    z_loss: Tensor
    dscale: Tensor
    dhidden: Tensor
    dweight: Tensor
    dbias: Tensor


def empty_outputs(inputs: Inputs, options: LinearLossOptions, saves: Saves, needs: Needs | None = None) -> Outputs:
    """All that is asked for, in new memory, in the dtype of the arithmetic."""
    hidden, weight = inputs.hidden, inputs.weight
    need_dhidden, need_dweight, need_dbias = needs or (False, False, False)
    rows = hidden.shape[:-1]
    reduced = rows if options.reduction == "none" else ()
    shapes = (
        (True, reduced), (saves.lse, rows), (saves.stats, rows), (saves.z_loss, reduced),
        (need_dhidden or need_dweight or need_dbias, ()),
        (need_dhidden, hidden.shape), (need_dweight, weight.shape), (need_dbias, weight.shape[:1]),
    )  # fmt: skip
    dtype = wide_dtype(hidden.dtype)
    return Outputs(*(hidden.new_empty(shape if wanted else (0,), dtype=dtype) for wanted, shape in shapes))


def total_weight(target: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The sum of the weights of the targets that count."""
    counts = target != ignore_index
    if class_weight is None:
        return counts.sum().to(dtype)
    known = counts & (target >= 0) & (target < class_weight.numel())
    return (class_weight.to(dtype).index_select(0, target.masked_fill(~known, 0)) * known).sum()


def mean_of(rows: Tensor, total: Tensor) -> Tensor:
    """The sum of `rows` over `total`; where nothing counts 0, unless it is NaN."""
    nothing, found = total == 0, rows.sum()
    return (found / total.masked_fill(nothing, 1.0)).masked_fill(nothing & ~found.isnan(), 0.0)
