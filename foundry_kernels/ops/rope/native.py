"""RoPE of the compiled extension: `csrc/torch/rope*.cpp` over kernels in `csrc/{cpu,cuda}/*rope.*`."""

import torch

rope = torch.ops.foundry_kernels.rope.default
qk_norm_rope = torch.ops.foundry_kernels.qk_norm_rope.default
