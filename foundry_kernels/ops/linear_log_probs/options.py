"""The options of one call of linear_log_probs, made and checked in the public function and read by every backend."""

from __future__ import annotations

from foundry_kernels.core.options import Options
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions
from foundry_kernels.ops.log_probs.options import LogProbsOptions


class LinearLogProbsOptions(
    Options, not_in_schema=("return_entropy", "return_lse"), schema_types={"ignore_index": "int"}
):
    ignore_index: int
    logit_scale: float
    softcap: float | None
    chunk_size: int | None  # as for linear_cross_entropy
    batch_invariant: bool
    return_entropy: bool = False
    return_lse: bool = False

    def of_logits(self) -> LogProbsOptions:
        """The options for logits that exist, scaled."""
        return LogProbsOptions(self.ignore_index, 1.0, self.softcap, self.return_entropy, self.return_lse)

    def of_loss(self) -> LinearLossOptions:
        """The options of the linear_cross_entropy with the same logits, chunks and tokens, whose strategies this
        operation uses. Its z-loss stands for the entropy."""
        return LinearLossOptions(
            self.ignore_index, "none", 0.0, 0.0, self.softcap, self.logit_scale, self.chunk_size, False,
            self.batch_invariant, self.return_lse, self.return_entropy,
        )  # fmt: skip
