"""The loss of a model from its last hidden states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.models.model import Model
from foundry_kernels.nn import RouterStats, load_balancing_loss, router_z_loss
from foundry_kernels.ops.cross_entropy import cross_entropy
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy


def token_loss(
    model: Model, y: Tensor, targets: Tensor, ignore_index: int, return_logits: bool
) -> tuple[Tensor | None, Tensor]:
    """Returns the logits, if requested, and the cross entropy."""
    shard = model.sequence_shard
    reduction = "mean" if shard is None else "sum"
    logits: Tensor | None = None
    if not return_logits and (head := model._head()) is not None:
        loss = _without_logits(model, y, head, targets, ignore_index, reduction)
    else:
        logits = model._logits(y)
        if is_dtensor(logits):
            loss = _sharded_loss(logits, targets, ignore_index, reduction)
        else:
            backend = model.backends["cross_entropy"]
            loss = cross_entropy(logits, targets, ignore_index=ignore_index, reduction=reduction, backend=backend)
    if shard is not None:
        loss = shard.mean(loss, (targets != ignore_index).sum())
    return logits if return_logits else None, loss


def add_router_losses(model: Model, loss: Tensor, stats: list[RouterStats]) -> Tensor:
    balancing, z = model.config.load_balancing_coef, model.config.router_z_coef
    if balancing:
        loss = loss + balancing * load_balancing_loss(stats)
    return loss + z * router_z_loss(stats) if z else loss


def _without_logits(
    model: Model,
    y: Tensor,
    head: tuple[Tensor, Tensor | None],
    targets: Tensor,
    ignore_index: int,
    reduction: str,
) -> Tensor:
    weight, bias = head
    backend = model.backends["linear_cross_entropy"]
    loss = linear_cross_entropy(
        y, weight, targets, bias=bias, ignore_index=ignore_index, reduction=reduction, backend=backend
    )
    return loss.full_tensor() if is_dtensor(loss) else loss  # type: ignore[attr-defined]


def _sharded_loss(logits: Tensor, targets: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The cross entropy of vocab-sharded logits, in torch's `loss_parallel`."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    targets = targets.flatten().long()
    total = F.cross_entropy(wide.flatten(0, 1), targets, ignore_index=ignore_index, reduction="sum")
    return total if reduction == "sum" else total / (targets != ignore_index).sum().clamp_min(1)
