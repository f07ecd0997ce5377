"""The options of one call of kl_div, made and checked in the public function and read by every backend."""

from __future__ import annotations

from foundry_kernels.core.options import Options


class KlDivOptions(Options, schema_types={"ignore_index": "int"}):
    ignore_index: int
    temperature: float
    direction: str  # "jsd" with a beta of 0 or 1 is "forward" or "reverse" here
    beta: float
    softcap: float | None
    teacher_softcap: float | None
