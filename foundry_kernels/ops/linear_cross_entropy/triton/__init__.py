"""linear_cross_entropy in two forms: PyTorch's matmuls, with this package's kernels between them (`launchers.py`).

All rows at once: a matmul computes all logits, one kernel computes the loss and overwrites the logits with their
gradient, and two matmuls compute the gradients of hidden and weight. No other memory of the logits' size is needed.

Blocks of classes ("tiles", `_linear_loss/class_blocks.py`): these need one more matmul, and little memory.

Chunks of rows, on the caller's request: as the first form, but matmuls add to a float32 sum of weight's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear_loss.problem import Chunk
from foundry_kernels.ops._linear_loss.triton import triton_backend
from foundry_kernels.ops.linear_cross_entropy.loss import LOSS, CrossEntropyRows
from foundry_kernels.ops.linear_cross_entropy.triton import launchers


class Rows(CrossEntropyRows):
    has_blocks = True

    def rows(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        losses = self.row_blocks(chunk.target, wanted, wide_dtype(chunk.logits.dtype))
        losses.add(chunk.logits, 0, dloss)
        return losses.results

    def rows_backward_(self, chunk: Chunk, dloss: Tensor, lse: Tensor, lse_low: Tensor, first: int) -> None:
        args = (self.class_weight, lse, lse_low, first, self.n_classes, self.of_logits)
        launchers.gradients_(chunk.logits, dloss, chunk.target, *args)

    def row_blocks(self, target: Tensor, wanted: frozenset[str], dtype: torch.dtype) -> launchers.Losses:
        return launchers.Losses(target, self.n_classes, self.class_weight, self.of_logits, dtype, wanted)


linear_cross_entropy = triton_backend(LOSS, Rows)
