"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.cross_entropy.options import LossOptions


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`args` are the `LossOptions`, one by one as the operators of the kernels take them."""
    loss, lse, z = with_lse(logits, target, weight, *args)
    return loss, None if lse is None else lse.detach(), z


def with_lse(
    logits: Tensor, target: Tensor, weight: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Computes `cross_entropy` with a differentiable lse."""
    ignore_index, reduction, label_smoothing, z_loss, softcap, return_lse, return_z_loss = LossOptions(*args)
    compute = wide_dtype(logits.dtype)
    n_classes = logits.shape[-1]
    counts, known = target != ignore_index, (target >= 0) & (target < n_classes)
    check_targets(target, known | ~counts, n_classes, ignore_index)
    # What is ignored must not reach the result, whatever it is: 0 * NaN would.
    y = torch.where(counts.unsqueeze(-1), logits.to(compute), 0.0)
    if softcap is not None:
        y = softcap * torch.tanh(y / softcap)
    index = torch.where(known, target, 0).long()
    weights = y.new_ones(n_classes) if weight is None else weight.to(compute)
    of_each = weights[index.unsqueeze(-1)].squeeze(-1)  # a single index would be read, which the meta device cannot
    of_target = torch.where(counts, of_each, 0.0)
    log_p = torch.log_softmax(y, -1)
    lse = torch.logsumexp(y, -1) if z_loss > 0.0 or return_lse else of_target
    nll = -log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    loss = of_target * (1.0 - label_smoothing) * nll
    z = of_target * z_loss * lse.square() if z_loss > 0.0 else torch.zeros_like(loss)
    loss = loss + z
    if label_smoothing > 0.0:
        loss = loss - label_smoothing / n_classes * torch.where(counts, (log_p * weights).sum(-1), 0.0)
    loss = torch.where(known | ~counts, loss, torch.nan)  # on a GPU
    if reduction != "none":
        loss, z = loss.sum(), z.sum()
    if reduction == "mean":
        total = of_target.sum()
        loss, z = (mean(x, total) for x in (loss, z))
    if not (return_lse or return_z_loss):
        return loss, None, None
    return loss, torch.where(counts, lse, 0.0) if return_lse else None, z.detach() if return_z_loss else None


def mean(x: Tensor, total: Tensor) -> Tensor:
    """x / total; where nothing counts 0, unless x is NaN."""
    return torch.where((total == 0) & ~x.isnan(), 0.0, x / torch.where(total == 0, 1.0, total))


def check_targets(target: Tensor, valid: Tensor, n_classes: int, ignore_index: int) -> None:
    """Checks on the CPU alone, and where the values can be read: not in a graph that is traced or under a transform."""
    if target.device.type != "cpu" or torch.compiler.is_compiling() or type(target) is not Tensor:
        return
    if torch._C._functorch.peek_interpreter_stack() is not None or bool(valid.all()):
        return
    bad = int(target[~valid].flatten()[0])
    raise IndexError(f"target must be in 0 .. {n_classes - 1} or ignore_index {ignore_index}; got {bad}")
