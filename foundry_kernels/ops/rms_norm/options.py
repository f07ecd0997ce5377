"""Options of the norms, besides tensors and eps."""

from __future__ import annotations

from foundry_kernels.core.options import Options


class WeightOptions(Options):
    """How RMSNorm multiplies by its weight, forward and backward."""

    weight_offset: float
    round_before_weight: bool


#: LayerNorm has no options of its weight.
PLAIN_WEIGHT = WeightOptions(0.0, False)
