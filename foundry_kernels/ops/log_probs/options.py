"""The options of one call of log_probs, made and checked in the public function and read by every backend."""

from __future__ import annotations

from foundry_kernels.core.options import Options


class LogProbsOptions(Options, not_in_schema=("return_entropy", "return_lse"), schema_types={"ignore_index": "int"}):
    ignore_index: int
    logit_scale: float
    softcap: float | None
    return_entropy: bool = False
    return_lse: bool = False
