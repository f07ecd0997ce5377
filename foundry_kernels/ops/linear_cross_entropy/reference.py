"""Plain PyTorch, with all logits, differentiated by autograd: what the chunked way must equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from foundry_kernels.ops.cross_entropy import reference


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    logit_scale: float,
    chunk_size: int | str | None,
    return_lse: bool,
    return_z_loss: bool,
) -> tuple[Any, ...]:
    hidden = torch.where((target != ignore_index).unsqueeze(-1), hidden, 0.0)  # 0 * NaN would reach the weight
    logits = linear(hidden, weight, bias)
    if logit_scale != 1.0:
        logits = logits * logit_scale
    return reference.cross_entropy(
        logits,
        target,
        class_weight,
        ignore_index,
        reduction,
        label_smoothing,
        z_loss,
        softcap,
        return_lse,
        return_z_loss,
    )
