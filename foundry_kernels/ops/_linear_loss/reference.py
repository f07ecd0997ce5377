"""Plain PyTorch, with all logits, differentiated by autograd."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.core.checks import constants
from foundry_kernels.ops._linear import linear
from foundry_kernels.ops._linear_loss.problem import Problem


def all_logits(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: Problem) -> Tensor:
    hidden = torch.where((target != options.ignore_index).unsqueeze(-1), hidden, 0.0)  # 0 * NaN would reach the weight
    logits = (linear if options.batch_invariant else F.linear)(hidden, weight, bias)
    (scale,) = constants(options.logit_scale)  # a loss without this option has it as a float of its class
    return logits if scale == 1.0 else logits * scale
