"""Chunks through Triton's cross-entropy."""

import torch

import foundry_kernels.ops.cross_entropy.triton  # noqa: F401  # whose operators these are
from foundry_kernels._triton import define
from foundry_kernels.ops.linear_cross_entropy import chunks

_OPS = torch.ops.foundry_kernels
linear_cross_entropy = chunks.make(
    "triton_", define, _OPS.triton_cross_entropy_fwd.default, _OPS.triton_cross_entropy_bwd.default, cpu=False
)
