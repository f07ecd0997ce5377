"""grouped_mm of the compiled extension: `csrc/torch/grouped_mm*.cpp` over kernels in `csrc/cpu/decode_linear.cpp`,
`csrc/cpu/matmul.cpp` and `csrc/cuda/grouped_mm.cu`."""

import torch

grouped_mm = torch.ops.foundry_kernels.grouped_mm.default
