"""Chunks through the extension's divergences, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.ops.kl_div.native import kl_div_fwd_bwd_
from foundry_kernels.ops.kl_div.options import KlDivOptions
from foundry_kernels.ops.linear_cross_entropy.native import define
from foundry_kernels.ops.linear_kl_div import sizes
from foundry_kernels.ops.linear_kl_div.operators import Strategy, make_backend

_FORWARD = torch.ops.foundry_kernels.kl_div_fwd.default


def _rows(
    logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions, dloss: Tensor | None
) -> Tensor:
    if dloss is None:
        return _FORWARD(logits, teacher_logits, target, *options)
    return kl_div_fwd_bwd_(logits, teacher_logits, target, dloss, *options)


linear_kl_div = make_backend("", define, Strategy(_rows, True, sizes.on_cpu))
