"""Chunks through the extension's divergences, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss.native import native_backend
from foundry_kernels.ops.kl_div.native import kl_div_fwd_bwd_
from foundry_kernels.ops.kl_div.options import KlDivOptions
from foundry_kernels.ops.linear_kl_div.loss import LOSS, KlDivRows
from foundry_kernels.ops.linear_log_probs.native import Rows as LogProbsRows

_FORWARD = torch.ops.foundry_kernels.kl_div_fwd.default


class Rows(KlDivRows):
    cpu = True
    log_probs = LogProbsRows

    def rows(
        self, logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions, dloss: Tensor | None
    ) -> Tensor:
        if dloss is None:
            return _FORWARD(logits, teacher_logits, target, *options)
        return kl_div_fwd_bwd_(logits, teacher_logits, target, dloss, *options)


linear_kl_div = native_backend(LOSS, Rows)
