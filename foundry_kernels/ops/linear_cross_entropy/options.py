"""The options of one call of linear_cross_entropy, made and checked in the public function, read by every backend."""

from __future__ import annotations

from foundry_kernels.core.options import Options
from foundry_kernels.ops.cross_entropy.options import LossOptions


class LinearCrossEntropyOptions(
    Options,
    not_in_schema=("return_lse", "return_z_loss", "return_predictions"),
    schema_types={"ignore_index": "int"},
):
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float
    chunk_size: int | None  # None: one is chosen
    token_scaling: bool
    batch_invariant: bool
    return_lse: bool = False
    return_z_loss: bool = False
    return_predictions: bool = False

    select = LossOptions.select

    def results(self) -> tuple[str, ...]:
        lse, z_loss = ("lse",) * self.return_lse, ("z_loss",) * self.return_z_loss
        return "loss", *lse, *z_loss, *("predicted",) * self.return_predictions

    def of_logits(self, reduction: str) -> LossOptions:
        """The options of the cross-entropy of logits that exist, scaled."""
        return LossOptions(
            self.ignore_index, reduction, self.label_smoothing, self.z_loss, self.softcap,
            self.return_lse, self.return_z_loss,
        )  # fmt: skip
