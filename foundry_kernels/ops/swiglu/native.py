"""Gated linear units of the compiled extension: `csrc/torch/swiglu*.cpp` over kernels in `csrc/{cpu,cuda}/swiglu.*`."""

import torch

swiglu = torch.ops.foundry_kernels.swiglu.default
geglu = torch.ops.foundry_kernels.geglu.default
glu = torch.ops.foundry_kernels.glu.default
reglu = torch.ops.foundry_kernels.reglu.default
