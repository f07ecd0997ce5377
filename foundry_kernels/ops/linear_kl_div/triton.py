"""Chunks with the kernel of kl_div between PyTorch's matmuls, or all rows at once."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear_loss.triton import triton_backend
from foundry_kernels.ops.kl_div.triton import fwd_bwd_
from foundry_kernels.ops.linear_kl_div.loss import LOSS, KlDivRows
from foundry_kernels.ops.log_probs import triton as log_probs
from foundry_kernels.ops.log_probs.options import LogProbsOptions


class Rows(KlDivRows):
    rows = staticmethod(fwd_bwd_)

    def of_student(self, logits: Tensor, target: Tensor, options: LogProbsOptions, result: str) -> Tensor:
        options = options._replace(return_entropy=result == "entropy")
        found = log_probs.Rows(target, self.n_classes, options, wide_dtype(logits.dtype), result == "lse", False)
        found.add(logits, 0)
        return found.outputs[1 if result == "entropy" else 2]

    def spread_(self, logits: Tensor, target: Tensor, options: LogProbsOptions, lse: Tensor, dlse: Tensor) -> None:
        none = torch.zeros_like(lse)
        log_probs.gradients(none, dlse, None, logits, target, lse, none, options, logits)


linear_kl_div = triton_backend(LOSS, Rows)
