"""RoPE of the compiled extension: `csrc/torch/rope*.cpp` over kernels in `csrc/{cpu,cuda}/*rope.*`."""

import torch

rope = torch.ops.foundry_kernels.rope.default
qk_norm_rope = torch.ops.foundry_kernels.qk_norm_rope.default
#: Rotates queries into a new tensor and keys into a cache, and copies values into another; for inference on the CPU.
rope_append = torch.ops.foundry_kernels.rope_append.default
