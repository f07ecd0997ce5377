"""Short convolutions of the compiled extension: `csrc/torch/short_conv1d*.cpp` over `csrc/cpu/short_conv1d.*`."""

import torch

from foundry_kernels.ops.short_conv1d.operators import make_backend

short_conv1d = make_backend(
    "", torch.ops.foundry_kernels.short_conv1d_fwd.default, torch.ops.foundry_kernels.short_conv1d_bwd.default
)
short_conv1d_step = torch.ops.foundry_kernels.short_conv1d_step.default
