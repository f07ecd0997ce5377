"""Plain PyTorch, with all logits, differentiated by autograd: what every other strategy must equal."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.ops import kl_div as of_logits
from foundry_kernels.ops._linear import linear
from foundry_kernels.ops.kl_div import reference
from foundry_kernels.ops.linear_kl_div.options import LinearKlDivOptions
from foundry_kernels.ops.linear_kl_div.teacher import Teacher


def linear_kl_div(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, teacher: Teacher, options: LinearKlDivOptions
) -> Tensor:
    counts = (target != options.ignore_index).unsqueeze(-1)
    multiply = linear if options.batch_invariant else F.linear
    logits = multiply(torch.where(counts, hidden, 0.0), weight, bias)  # 0 * NaN would reach the weight
    of_teacher = teacher.logits
    if of_teacher is None:
        assert teacher.hidden is not None
        assert teacher.weight is not None
        of_teacher = multiply(teacher.hidden, teacher.weight, teacher.bias)
    each = reference.kl_div(logits, of_teacher, target, options.of_logits())
    if options.reduction == "none":
        return each
    return of_logits.reduced(each, target, options.ignore_index, options.reduction)
