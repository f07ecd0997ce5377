"""The options of one call of kl_div, made and checked in the public function and read by every backend."""

from __future__ import annotations

from foundry_kernels.core.options import Options


class KlDivOptions(Options, schema_types={"ignore_index": "int"}):
    ignore_index: int
    temperature: float
    beta: float  # 0: KL(teacher || student), 1: KL(student || teacher), between: generalized Jensen-Shannon
