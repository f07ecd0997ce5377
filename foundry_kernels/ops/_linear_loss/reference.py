"""Plain PyTorch, with all logits, differentiated by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.core.checks import constants
from foundry_kernels.ops._linear import linear
from foundry_kernels.ops._linear_loss.problem import Problem


def all_logits(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, low: Tensor | None, up: Tensor | None,
    options: Problem,
) -> Tensor:  # fmt: skip
    counts = (target != options.ignore_index).unsqueeze(-1)
    multiply = linear if options.batch_invariant else F.linear
    logits = multiply(torch.where(counts, hidden, 0.0), weight, bias)  # 0 * NaN would reach the weight
    if low is not None and up is not None:
        dtype = torch.promote_types(low.dtype, up.dtype)
        logits = (logits + multiply(torch.where(counts, low, 0.0).to(dtype), up.to(dtype))).to(logits.dtype)
    (scale,) = constants(options.logit_scale)  # a loss without this option has it as a float of its class
    return logits if scale == 1.0 else logits * scale
