"""The kernels of log_probs between PyTorch's matmuls: all rows at once, blocks of classes, or chunks of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear_loss.problem import Chunk, RowKernel
from foundry_kernels.ops._linear_loss.triton import triton_backend
from foundry_kernels.ops.linear_log_probs.loss import LOSS, numbers, results
from foundry_kernels.ops.log_probs import triton as of_logits
from foundry_kernels.ops.log_probs.options import STATS


class _Results(of_logits.Rows):
    @property
    def results(self) -> dict[str, Tensor]:
        return results(*self.outputs)


class Rows(RowKernel):
    has_blocks = True

    def forward(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        found = self.blocks(chunk.target, wanted, wide_dtype(chunk.logits.dtype))
        found.add(chunk.logits, 0)
        return found.results

    def gradients_(self, chunk: Chunk, dloss: Tensor, saved: tuple[Tensor, ...], first: int) -> None:
        _, logits, target = chunk
        (g, c, b), (lse, lse_low), options = numbers(dloss), saved, self.options.of_logits()
        of_logits.gradients(g, c, b, logits, target, lse, lse_low, options, logits, first, self.n_classes)

    def blocks(self, target: Tensor, wanted: frozenset[str], dtype: torch.dtype) -> _Results:
        options = self.options.of_logits()._replace(
            return_entropy="entropy" in wanted, return_stats=not wanted.isdisjoint(STATS)
        )
        return _Results(target, self.n_classes, options, dtype, "lse" in wanted, "lse_low" in wanted)


linear_log_probs = triton_backend(LOSS, Rows)
