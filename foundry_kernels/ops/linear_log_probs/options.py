"""The options of one call of linear_log_probs, made and checked in the public function and read by every backend."""

from __future__ import annotations

from foundry_kernels.core.options import Options
from foundry_kernels.ops.log_probs.options import STATS, LogProbsOptions


class LinearLogProbsOptions(
    Options, not_in_schema=("return_entropy", "return_lse", "return_stats"), schema_types={"ignore_index": "int"}
):
    ignore_index: int
    logit_scale: float
    softcap: float | None
    chunk_size: int | None  # as for linear_cross_entropy
    batch_invariant: bool
    return_entropy: bool = False
    return_lse: bool = False
    return_stats: bool = False

    reduction = "none"

    def results(self) -> tuple[str, ...]:
        entropy, lse = ("entropy",) * self.return_entropy, ("lse",) * self.return_lse
        return "log_probs", *entropy, *lse, *STATS * self.return_stats

    def of_logits(self) -> LogProbsOptions:
        """The options for logits that exist, scaled."""
        flags = (self.return_entropy, self.return_lse, self.return_stats)
        return LogProbsOptions(self.ignore_index, 1.0, self.softcap, *flags)
