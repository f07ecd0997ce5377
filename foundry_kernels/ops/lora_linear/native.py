"""The thin matmuls of the compiled extension: `csrc/torch/lora_linear*.cpp` over kernels in
`csrc/cpu/lora_linear.*`."""

from __future__ import annotations

from functools import partial

import torch

from foundry_kernels.ops.lora_linear import autograd

_ops = torch.ops.foundry_kernels
_PRODUCTS = autograd.Products(
    _ops.lora_down.default, _ops.lora_up.default, _ops.lora_up_.default, _ops.lora_outer.default
)

lora_linear = partial(autograd.lora_linear, _PRODUCTS)
