r"""Cross-entropy where the targets are probabilities of classes, as PyTorch's function takes them.

With logits x, targets t, class weights w and label smoothing :math:`\epsilon`, of a token

.. math:: \ell = -\sum_j w_j t'_j \log p_j, \quad t' = (1 - \epsilon) t + \epsilon / C, \quad p = \mathrm{softmax}(x)

and the mean is over the tokens, whatever their weights. The targets need not add up to 1. With :math:`s = \sum_j w_j
t'_j` the gradients are :math:`s p_j - w_j t'_j` of x, :math:`-(1 - \epsilon) w_j \log p_j` of t and, summed over
tokens, :math:`-t'_j \log p_j` of w.

There is no kernel for it, because the targets are as large as the logits and are in memory anyway. PyTorch's operations
process a part of the batch at a time, and the backward pass recomputes log-softmax, so that besides inputs and
gradients only the values of one part exist.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_device, check_float, check_shape
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.registry import is_subclass, resolve, wide_dtype
from foundry_kernels.ops.cross_entropy import CROSS_ENTROPY, check_classes, reference

#: Logits of a part of the batch, if it has more than one element: on a CPU they stay in its cache.
_PART_CPU, _PART = 1 << 18, 1 << 24


def cross_entropy(
    logits: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float, backend: str
) -> Tensor:
    """The loss of ``logits [C]`` or ``[N, C, ...]`` for probabilities of their shape; float32 (float64) and
    differentiable by all three tensors.

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: as :func:`foundry_kernels.cross_entropy` would.
    """
    check_float("target", target)
    check_shape("target", target, logits.shape, "input's, for probabilities of classes")
    check_device("target", target, "input", logits)
    class_dim = min(logits.dim() - 1, 1)
    if logits.dim() == 0 or logits.shape[class_dim] == 0:
        raise ValueError(f"input must have at least one class; got shape {tuple(logits.shape)}")
    check_classes("input", logits, logits.shape[class_dim], "weight", weight, reduction, label_smoothing)
    function = resolve(CROSS_ENTROPY, backend, logits)
    tokens = (*logits.shape[:class_dim], *logits.shape[class_dim + 1 :])
    if class_dim == 0:
        logits, target = logits.unsqueeze(0), target.unsqueeze(0)
    # A compiler fuses plain operations; DTensors, transforms and second derivatives need PyTorch's own autograd.
    plain = function is reference.cross_entropy or torch.compiler.is_compiling() or is_subclass(logits)
    losses = (_losses if plain else _InParts.apply)(logits, target, weight, label_smoothing).view(tokens)
    if reduction == "none":
        return losses
    return losses.sum() / max(losses.numel(), 1) if reduction == "mean" else losses.sum()


def _of_classes(weight: Tensor | None, like: Tensor) -> Tensor | None:
    """`weight` in like's dtype, as a factor of `like` ``[N, C, ...]``."""
    return None if weight is None else weight.to(like.dtype).view(-1, *(1 for _ in like.shape[2:]))


def _smoothed(target: Tensor, label_smoothing: float, dtype: torch.dtype) -> Tensor:
    target = target.to(dtype)
    return target if label_smoothing == 0.0 else target * (1.0 - label_smoothing) + label_smoothing / target.shape[1]


def _losses(logits: Tensor, target: Tensor, weight: Tensor | None, label_smoothing: float) -> Tensor:
    """The loss ``[N, ...]`` of each token."""
    log_p = torch.log_softmax(logits, 1, dtype=wide_dtype(logits.dtype))
    terms = log_p * _smoothed(target, label_smoothing, log_p.dtype)
    factor = _of_classes(weight, terms)
    return -(terms if factor is None else terms * factor).sum(1)


class _InParts(torch.autograd.Function):
    """`_losses` of some elements of the batch at a time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, label_smoothing: float) -> Tensor:
        ctx.save_for_backward(logits, target, weight)
        ctx.label_smoothing = label_smoothing
        losses = logits.new_empty((logits.shape[0], *logits.shape[2:]), dtype=wide_dtype(logits.dtype))
        for part in _parts(logits):
            losses[part] = _losses(logits[part], target[part], weight, label_smoothing)
        return losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> Any:
        refuse_second_derivative("cross_entropy")
        logits, target, weight = ctx.saved_tensors
        of_logits, of_target, of_weight, _ = ctx.needs_input_grad
        dlogits = torch.empty_like(logits) if of_logits else None
        dtarget = torch.empty_like(target) if of_target else None
        dweight = weight.new_zeros(weight.shape, dtype=dlosses.dtype) if of_weight else None
        for part in _parts(logits):
            d = dlosses[part].unsqueeze(1)
            log_p = torch.log_softmax(logits[part], 1, dtype=dlosses.dtype)
            factor = _of_classes(weight, log_p)
            probabilities = _smoothed(target[part], ctx.label_smoothing, log_p.dtype)
            if dweight is not None:
                terms = probabilities * log_p * d
                dweight -= terms.transpose(0, 1).flatten(1).sum(1)
            if dtarget is not None:
                slope = log_p if factor is None else log_p * factor
                dtarget[part] = slope * (d * (ctx.label_smoothing - 1.0))
            if dlogits is not None:
                weighted = probabilities if factor is None else probabilities * factor
                dlogits[part] = (log_p.exp() * weighted.sum(1, keepdim=True) - weighted) * d
        return dlogits, dtarget, None if dweight is None else dweight.to(weight.dtype), None


def _parts(logits: Tensor) -> list[slice]:
    n, size = logits.shape[0], max(math.prod(logits.shape[1:]), 1)
    step = max((_PART_CPU if logits.is_cpu else _PART) // size, 1)
    return [slice(i, min(i + step, n)) for i in range(0, n, step)]
