"""Divergences of the compiled extension: `csrc/torch/kl_div*.cpp` over `csrc/cpu/kl_div.*`."""

import torch
from torch import Tensor

from foundry_kernels.ops.kl_div.options import KlDivOptions

_OPERATOR = torch.ops.foundry_kernels.kl_div.default
#: Returns the losses, and makes the logits their gradient, in place.
kl_div_fwd_bwd_ = torch.ops.foundry_kernels.kl_div_fwd_bwd_.default


def kl_div(logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions) -> Tensor:
    loss: Tensor = _OPERATOR(logits, teacher_logits, target, *options.operator_args())
    return loss
