"""What the operators of the norms are told beside their tensors and eps."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.core.options import Options


class WeightOptions(Options):
    """How RMSNorm multiplies by its weight, forward and backward."""

    weight_offset: float
    round_before_weight: bool


class DropoutOptions(Options):
    """Dropout of what is added to the residual; without a seed there is none."""

    dropout_p: float = 0.0
    dropout_seed: Tensor | None = None


#: LayerNorm has no options of its weight.
PLAIN_WEIGHT = WeightOptions(0.0, False)
NO_DROPOUT = DropoutOptions()
