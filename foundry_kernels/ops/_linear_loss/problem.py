"""What the operators are called with and what they return, under names; and what every strategy needs of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.cross_entropy.tokens import known_targets, probabilities_of
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
    """The results of the forward pass besides the loss. stats: lse with its rounding error, for a backward pass.
    predicted: the class of each token's largest logit."""

    lse: bool
    z_loss: bool
    stats: bool
    predicted: bool


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
    predicted: Tensor


class Kernels(NamedTuple):
    """The cross-entropy of logits that exist, as a backend computes it.

    forward: of (logits, target, class_weight, options, save_lse, save_z_loss, save_stats, dloss) each token's loss,
    lse,
        its rounding error, and z-loss; with `dloss`, the gradient of each token's loss, the logits' own gradient is
        written over them.
    gradients_: of (logits, dloss, target, class_weight, lse, lse_low, first, n_classes, options) writes over the logits
        of the classes from `first` on their gradient.
    cpu: whether values may be looked at (see `chunks.Tokens`).
    classes: how many have logits at a time in `vocabulary_blocks`, of (n_tokens, n_classes, itemsize).
    losses: the losses from one block of classes after another; None where there are none (`triton/launchers.py`).
    """

    forward: Callable[..., tuple[Tensor, ...]]
    gradients_: Callable[..., None]
    cpu: bool
    classes: Callable[[int, int, int], int]
    losses: Any = None


def empty_outputs(
    inputs: Inputs, options: LinearLossOptions, saves: Saves, needs: Needs,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
) -> Outputs:  # fmt: skip
    """All that is asked for, in new memory, in the dtype of the arithmetic, the gradients in `dtypes`; predictions are
    int64."""
    hidden, weight = inputs.hidden, inputs.weight
    need_dhidden, need_dweight, need_dbias = needs
    rows = hidden.shape[:-1]
    reduced = rows if options.reduction == "none" else ()
    shapes = (
        (True, reduced), (saves.lse, rows), (saves.stats, rows), (saves.z_loss, reduced),
        (need_dhidden or need_dweight or need_dbias, ()),
        (need_dhidden, hidden.shape), (need_dweight, weight.shape), (need_dbias, weight.shape[:1]),
    )  # fmt: skip
    dtype = wide_dtype(hidden.dtype)
    found = [hidden.new_empty(shape if wanted else (0,), dtype=dtype) for wanted, shape in shapes]
    if any(needs):
        found[-3:] = [gradient.to(d) for gradient, d in zip(found[-3:], dtypes, strict=True)]
    found.append(hidden.new_empty(rows if saves.predicted else (0,), dtype=torch.int64))
    return Outputs(*found)


def total_weight(target: Tensor, class_weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The sum of the weights of the targets that count."""
    counts = target != ignore_index
    if class_weight is None:
        return counts.sum().to(dtype)
    known = counts & (target >= 0) & (target < class_weight.numel())
    return (class_weight.to(dtype).index_select(0, target.masked_fill(~known, 0)) * known).sum()


def mean_of(rows: Tensor, total: Tensor | int) -> Tensor:
    """The sum of `rows` over `total`; where nothing counts 0, unless it is NaN."""
    if isinstance(total, int):
        return rows.sum() / max(total, 1)
    nothing, found = total == 0, rows.sum()
    return (found / total.masked_fill(nothing, 1.0)).masked_fill(nothing & ~found.isnan(), 0.0)


#: Tokens of which rows of the weight are gathered at a time.
_ROWS = 2048


def target_probabilities(inputs: Inputs, lse: Tensor, options: LinearLossOptions, logits_dtype: torch.dtype) -> Tensor:
    """Each target's probability ``[...]`` where there are no logits that it could be read from, which had this dtype
    when lse was made of them."""
    hidden, weight, target, bias, _ = inputs
    known = known_targets(target, weight.shape[0], options.ignore_index)
    index = torch.where(known, target, 0).long()
    x, at = hidden.detach().reshape(-1, hidden.shape[-1]), index.reshape(-1)
    step = at.numel() if torch.compiler.is_compiling() else _ROWS  # a loop would fix the number of tokens
    rows = [
        (part.to(lse.dtype) * weight.detach()[i].to(lse.dtype)).sum(1)
        for part, i in zip(x.split(max(step, 1)), at.split(max(step, 1)), strict=True)
    ]
    picked = torch.cat(rows).view(target.shape)
    if bias is not None:
        picked = picked + bias.detach()[index].to(lse.dtype)
    picked = (picked.to(logits_dtype) * options.logit_scale).to(lse.dtype)
    return probabilities_of(picked, known, lse, options.softcap)


def scaled(
    losses: Tensor, zs: Any, p: Tensor, target: Tensor, class_weight: Tensor | None, options: LinearLossOptions
) -> tuple[Tensor, Any]:
    """The losses of the tokens, and their z-losses where these are returned, times p and reduced."""
    losses, zs = losses * p, zs * p if options.return_z_loss else None
    if options.reduction == "none":
        return losses, zs
    if options.reduction == "sum":
        return losses.sum(), None if zs is None else zs.sum()
    total = total_weight(target.reshape(-1), class_weight, options.ignore_index, losses.dtype)
    return mean_of(losses, total), None if zs is None else mean_of(zs, total)
