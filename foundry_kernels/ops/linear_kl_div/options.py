"""The options of one call of linear_kl_div, made and checked in the public function and read by every backend."""

from __future__ import annotations

from foundry_kernels.core.options import Options
from foundry_kernels.ops.kl_div.options import KlDivOptions


class LinearKlDivOptions(Options, schema_types={"ignore_index": "int"}):
    ignore_index: int
    temperature: float
    beta: float  # as in KlDivOptions
    reduction: str
    chunk_size: int | None  # as for linear_cross_entropy, but never tiles
    batch_invariant: bool

    logit_scale, softcap = 1.0, None

    def results(self) -> tuple[str, ...]:
        return ("loss",)

    def of_logits(self) -> KlDivOptions:
        """The options for logits that exist."""
        return KlDivOptions(self.ignore_index, self.temperature, self.beta)
