"""The gated RMSNorm of the compiled extension: `csrc/torch/gated_rms_norm*.cpp` over `csrc/cpu/gated_rms_norm.*`."""

import torch

from foundry_kernels.ops.gated_rms_norm.operators import make_backend

gated_rms_norm = make_backend(
    "", torch.ops.foundry_kernels.gated_rms_norm_fwd.default, torch.ops.foundry_kernels.gated_rms_norm_bwd.default
)
