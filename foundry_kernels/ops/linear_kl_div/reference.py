"""Plain PyTorch, with all logits, differentiated by autograd: what every other strategy must equal."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.ops import kl_div as of_logits
from foundry_kernels.ops._linear import linear
from foundry_kernels.ops._linear_loss.reference import all_logits
from foundry_kernels.ops.kl_div import reference
from foundry_kernels.ops.linear_kl_div.options import LinearKlDivOptions


def linear_kl_div(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, low: Tensor | None, up: Tensor | None,
    teacher_hidden: Tensor | None, teacher_weight: Tensor | None, teacher_bias: Tensor | None,
    teacher_logits: Tensor | None, options: LinearKlDivOptions,
) -> dict[str, Tensor]:  # fmt: skip
    logits = all_logits(hidden, weight, target, bias, low, up, options)
    if teacher_logits is None:
        assert teacher_hidden is not None
        assert teacher_weight is not None
        multiply = linear if options.batch_invariant else F.linear
        teacher_logits = multiply(teacher_hidden, teacher_weight, teacher_bias)
    each = reference.kl_div(logits, teacher_logits, target, options.of_logits())
    if options.reduction != "none":
        each = of_logits.reduced(each, target, options.ignore_index, options.reduction)
    return {"loss": each}
