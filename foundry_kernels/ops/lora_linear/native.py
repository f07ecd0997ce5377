"""The thin matmuls of the compiled extension: `csrc/torch/lora_linear*.cpp` over kernels in
`csrc/cpu/lora_linear.*`. A direct call of plain tensors has the whole composition in C++
(`csrc/torch/lora_linear_layers.cpp`)."""

from __future__ import annotations

from functools import partial

import torch

from foundry_kernels.ops.lora_linear import autograd

_OPS = torch.ops.foundry_kernels
_PRODUCTS = autograd.Products(
    _OPS.lora_down.default, _OPS.lora_up.default, _OPS.lora_outer.default, _OPS.lora_up_.default
)

lora_linear = partial(autograd.lora_linear, _PRODUCTS)
