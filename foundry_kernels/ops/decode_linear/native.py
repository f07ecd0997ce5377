"""decode_linear of the compiled extension: `csrc/torch/decode_linear_cpu.cpp` over `csrc/cpu/decode_linear.*`."""

import torch

decode_linear = torch.ops.foundry_kernels.decode_linear.default
