"""Chunks with the kernel of kl_div between PyTorch's matmuls, or all rows at once."""

from __future__ import annotations

from foundry_kernels._triton.operators import define
from foundry_kernels.ops.kl_div.triton import fwd_bwd_
from foundry_kernels.ops.linear_cross_entropy.triton import launchers
from foundry_kernels.ops.linear_kl_div import sizes
from foundry_kernels.ops.linear_kl_div.operators import Strategy, make_backend

linear_kl_div = make_backend("triton_", define, Strategy(fwd_bwd_, False, sizes.on_gpu, launchers.scale_))
