"""The scan over linear attention of the compiled extension, and a step: `csrc/torch/ssd*.cpp` over `csrc/cpu/ssd*`."""

import torch

from foundry_kernels.ops.ssd.operators import make_backend

ssd = make_backend(
    "", torch.ops.foundry_kernels.gated_delta_rule_fwd.default, torch.ops.foundry_kernels.gated_delta_rule_bwd.default
)
ssd_step = torch.ops.foundry_kernels.ssd_step.default
