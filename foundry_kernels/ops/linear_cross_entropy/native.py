"""Chunks through the extension's cross-entropy, on the CPU; or in the backward pass blocks of classes."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss.native import native_backend
from foundry_kernels.ops._linear_loss.problem import Chunk
from foundry_kernels.ops.cross_entropy.native import cross_entropy_bwd_classes_
from foundry_kernels.ops.linear_cross_entropy.loss import LOSS, CrossEntropyRows

_FORWARD = torch.ops.foundry_kernels.cross_entropy_fwd.default


class Rows(CrossEntropyRows):
    cpu = True

    def rows(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        saves = ("lse" in wanted, "z_loss" in wanted, "lse_low" in wanted)
        args = (self.class_weight, *self.of_logits.operator_args(), *saves)
        loss, lse, lse_low, z, _ = _FORWARD(chunk.logits, chunk.target, *args)
        if dloss is not None:
            self.rows_backward_(chunk, dloss, lse, lse_low, 0)
        return {"loss": loss, "lse": lse, "lse_low": lse_low, "z_loss": z}

    def rows_backward_(self, chunk: Chunk, dloss: Tensor, lse: Tensor, lse_low: Tensor, first: int) -> None:
        """In place: a second block of a chunk's size would take longer to be handed out by the system than to be
        written."""
        options = self.of_logits
        cross_entropy_bwd_classes_(
            chunk.logits, dloss, chunk.target, self.class_weight, lse, lse_low, first, self.n_classes,
            options.ignore_index, options.label_smoothing, options.z_loss, options.softcap,
        )  # fmt: skip


linear_cross_entropy = native_backend(LOSS, Rows)
