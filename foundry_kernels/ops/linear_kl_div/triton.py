"""Chunks with the kernel of kl_div between PyTorch's matmuls, or all rows at once."""

from __future__ import annotations

from foundry_kernels.ops._linear_loss.triton import triton_backend
from foundry_kernels.ops.kl_div.triton import fwd_bwd_
from foundry_kernels.ops.linear_kl_div.loss import LOSS, KlDivRows
from foundry_kernels.ops.linear_log_probs.triton import Rows as LogProbsRows


class Rows(KlDivRows):
    log_probs = LogProbsRows
    rows = staticmethod(fwd_bwd_)


linear_kl_div = triton_backend(LOSS, Rows)
