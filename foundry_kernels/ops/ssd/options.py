"""The options of one call of ssd, made and checked in the public function and read by every backend."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.core.options import Options
from foundry_kernels.ops.gated_delta_rule.options import DeltaRuleOptions


class SsdOptions(Options):
    cu_seqlens: Tensor | None  # [n + 1]: packed documents, with a batch of 1
    dt_softplus: bool
    dt_min: float
    dt_max: float
    chunk_size: int | None  # None: the backend's choice; the reference has no chunks
    return_final_states: bool

    def of_attention(self) -> DeltaRuleOptions:
        return DeltaRuleOptions(
            self.cu_seqlens,
            scale=1.0,
            qk_l2norm=False,
            delta=False,
            beta_limit=None,
            chunk_size=self.chunk_size,
            return_final_state=self.return_final_states,
        )
