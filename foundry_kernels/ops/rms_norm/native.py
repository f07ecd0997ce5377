"""RMSNorm of the compiled extension: `csrc/torch/rms_norm*.cpp` over kernels in `csrc/{cpu,cuda}/rms_norm.*`."""

import torch

rms_norm = torch.ops.foundry_kernels.rms_norm.default
add_rms_norm = torch.ops.foundry_kernels.add_rms_norm.default
