"""Chunks through the extension's log-probabilities, on the CPU; or in the backward pass blocks of classes."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss.native import native_backend
from foundry_kernels.ops._linear_loss.problem import Chunk, RowKernel
from foundry_kernels.ops.linear_log_probs.loss import LOSS, numbers, results
from foundry_kernels.ops.log_probs.native import log_probs_bwd_classes_
from foundry_kernels.ops.log_probs.options import STATS

_FORWARD = torch.ops.foundry_kernels.log_probs_fwd.default


class Rows(RowKernel):
    cpu = True

    def forward(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        saves = [*(name in wanted for name in ("entropy", "lse", "lse_low")), not wanted.isdisjoint(STATS)]
        return results(*_FORWARD(chunk.logits, chunk.target, *self.options.of_logits().operator_args(), *saves))

    def gradients_(self, chunk: Chunk, dloss: Tensor, saved: tuple[Tensor, ...], first: int) -> None:
        options = self.options.of_logits().operator_args()
        log_probs_bwd_classes_(chunk.logits, *numbers(dloss), chunk.target, *saved, first, self.n_classes, *options)


linear_log_probs = native_backend(LOSS, Rows)
