"""The options of one call of cross_entropy, made and checked in the public function and read by every backend."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foundry_kernels.core.options import Options


class LossOptions(Options, not_in_schema=("return_lse", "return_z_loss"), schema_types={"ignore_index": "int"}):
    ignore_index: int
    reduction: str
    label_smoothing: float
    z_loss: float
    softcap: float | None
    return_lse: bool = False
    return_z_loss: bool = False

    def select(self: Any, loss: Tensor, lse: Tensor | None, z_loss: Tensor | None) -> Tensor | tuple[Any, ...]:
        """The requested results. `self` may also be the options of linear_cross_entropy."""
        if not (self.return_lse or self.return_z_loss):
            return loss
        return loss, *([lse] if self.return_lse else []), *([z_loss] if self.return_z_loss else [])
