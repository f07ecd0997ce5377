"""The options of one call of linear_kl_div, made and checked in the public function and read by every backend."""

from __future__ import annotations

from foundry_kernels.core.options import Options
from foundry_kernels.ops.kl_div.options import KlDivOptions
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions


class LinearKlDivOptions(Options, schema_types={"ignore_index": "int"}):
    ignore_index: int
    temperature: float
    beta: float  # as in KlDivOptions
    reduction: str
    chunk_size: int | None  # as for linear_cross_entropy, but never tiles
    batch_invariant: bool

    def of_logits(self) -> KlDivOptions:
        """The options for logits that exist."""
        return KlDivOptions(self.ignore_index, self.temperature, self.beta)

    def of_loss(self) -> LinearLossOptions:
        """The options of the linear_cross_entropy with the same logits, chunks, tokens and reduction, whose strategy
        this operation uses."""
        return LinearLossOptions(
            self.ignore_index, self.reduction, 0.0, 0.0, None, 1.0, self.chunk_size, False, self.batch_invariant
        )
