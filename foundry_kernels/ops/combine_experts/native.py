"""combine_experts of the compiled extension: `csrc/torch/combine_experts*.cpp` over kernels in `csrc/{cpu,cuda}`."""

import torch

combine_experts = torch.ops.foundry_kernels.combine_experts.default
