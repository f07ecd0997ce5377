"""Plain PyTorch, with all logits, differentiated by autograd: what every other strategy must equal."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.ops._linear import linear
from foundry_kernels.ops.cross_entropy import reference, tokens
from foundry_kernels.ops.linear_cross_entropy.calls import scaled
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
    logits = (linear if options.batch_invariant else F.linear)(hidden, weight, bias)
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    predicted = tokens.predictions(logits, target, options.ignore_index) if options.return_predictions else None
    if not options.token_scaling:
        found = reference.with_lse(logits, target, class_weight, *options.of_logits(options.reduction))
        return *found, predicted
    per_token = options.of_logits("none")._replace(return_lse=True)
    losses, lse, zs = reference.with_lse(logits, target, class_weight, *per_token)
    assert lse is not None  # which was asked for
    p = tokens.probabilities(logits, target, lse, options.ignore_index, options.softcap)
    loss, z = scaled(losses, zs, p, target, class_weight, options)
    return loss, lse, z, predicted
