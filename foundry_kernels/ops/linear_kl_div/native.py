"""Chunks through the extension's divergences, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss.native import native_backend
from foundry_kernels.ops.kl_div.native import kl_div_fwd_bwd_
from foundry_kernels.ops.kl_div.options import KlDivOptions
from foundry_kernels.ops.linear_kl_div.loss import LOSS, KlDivRows
from foundry_kernels.ops.log_probs.native import log_probs_bwd_classes_
from foundry_kernels.ops.log_probs.options import LogProbsOptions

_LOG_PROBS = torch.ops.foundry_kernels.log_probs_fwd.default
_FORWARD = torch.ops.foundry_kernels.kl_div_fwd.default


class Rows(KlDivRows):
    cpu = True

    def rows(
        self, logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions, dloss: Tensor | None
    ) -> Tensor:
        if dloss is None:
            return _FORWARD(logits, teacher_logits, target, *options)
        return kl_div_fwd_bwd_(logits, teacher_logits, target, dloss, *options)

    def of_student(self, logits: Tensor, target: Tensor, options: LogProbsOptions, result: str) -> Tensor:
        wanted = (result == "entropy", result == "lse", False, False)
        _, entropy, lse, *_ = _LOG_PROBS(logits, target, *options.operator_args(), *wanted)
        return entropy if result == "entropy" else lse

    def spread_(self, logits: Tensor, target: Tensor, options: LogProbsOptions, lse: Tensor, dlse: Tensor) -> None:
        none, args = torch.zeros_like(lse), options.operator_args()
        log_probs_bwd_classes_(logits, none, dlse, None, target, lse, none, 0, self.n_classes, *args)


linear_kl_div = native_backend(LOSS, Rows)
