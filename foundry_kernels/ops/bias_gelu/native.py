"""Activations of a sum of the compiled extension: `csrc/torch/bias_gelu*.cpp` over kernels in
`csrc/{cpu,cuda}/bias_gelu.*`."""

import torch

bias_gelu = torch.ops.foundry_kernels.bias_gelu.default
bias_silu = torch.ops.foundry_kernels.bias_silu.default
bias_relu = torch.ops.foundry_kernels.bias_relu.default
