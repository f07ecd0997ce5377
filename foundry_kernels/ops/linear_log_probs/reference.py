"""Plain PyTorch, with all logits, differentiated by autograd: what every other strategy must equal."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.ops._linear import linear
from foundry_kernels.ops.linear_log_probs.options import LinearLogProbsOptions
from foundry_kernels.ops.log_probs import reference


def linear_log_probs(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: LinearLogProbsOptions
) -> tuple[Any, ...]:
    hidden = torch.where((target != options.ignore_index).unsqueeze(-1), hidden, 0.0)  # 0 * NaN would reach the weight
    logits = (linear if options.batch_invariant else F.linear)(hidden, weight, bias)
    if options.logit_scale != 1.0:
        logits = logits * options.logit_scale
    return reference.log_probs(logits, target, options.of_logits())
