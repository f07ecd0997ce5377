"""Plain PyTorch, with all logits, differentiated by autograd: what every other strategy must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from foundry_kernels.ops.cross_entropy import reference
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    options: LinearLossOptions,
) -> tuple[Any, ...]:
    hidden = torch.where((target != options.ignore_index).unsqueeze(-1), hidden, 0.0)  # 0 * NaN would reach the weight
    logits = linear(hidden, weight, bias)
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    return reference.cross_entropy(logits, target, class_weight, *options.of_logits(options.reduction))
