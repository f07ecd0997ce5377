"""The options of one call of gated_delta_rule, made and checked in the public functions and read by every backend."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.core.options import Options


class DeltaRuleOptions(Options, not_in_schema=("return_final_state",)):
    cu_seqlens: Tensor | None  # [N + 1]: packed documents, with a batch of 1
    scale: float
    qk_l2norm: bool
    delta: bool  # False: gated linear attention, which adds k v^T without looking at the state
    chunk_size: int | None  # None: the backend's choice; the reference has no chunks
    beta_limit: float | None  # beta is beta_limit * sigmoid(beta); None: as it is
    return_final_state: bool = False
