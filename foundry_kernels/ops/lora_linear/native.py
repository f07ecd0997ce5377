"""The thin matmuls of the compiled extension: `csrc/torch/lora_linear*.cpp` over kernels in
`csrc/cpu/lora_linear.*`; of few rows PyTorch's, which need not pack the adapter."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import invariance
from foundry_kernels.core.registry import is_subclass
from foundry_kernels.ops.lora_linear import autograd

#: The number of rows up to which PyTorch's matmuls are faster in all dtypes; float32 sums always are.
_FEW = 4

_down = torch.ops.foundry_kernels.lora_down.default
_up_ = torch.ops.foundry_kernels.lora_up_.default


def _by_pytorch(x: Tensor, a: Tensor, seed: Tensor | None) -> bool:
    """Whether PyTorch's float32 matmuls may replace the kernels'."""
    if a.dtype != torch.float32 or seed is not None or invariance.on or torch.is_autocast_enabled("cpu"):
        return False
    return not is_subclass(x) and not is_dynamo_compiling()


def _down_of(x: Tensor, a: Tensor, scale: float, dropout_p: float, seed: Tensor | None) -> Tensor:
    if scale == 1.0 and x.shape[0] <= _FEW and _by_pytorch(x, a, seed):
        return torch.mm(x.float(), a.t())
    found: Tensor = _down(x, a, scale, dropout_p, seed)
    return found


def _add_to(base: Tensor, t: Tensor, b: Tensor, scale: float, dropout_p: float, seed: Tensor | None) -> None:
    narrow = base.dtype != torch.float32
    if (narrow and base.shape[0] > _FEW) or not _by_pytorch(base, b, seed):
        _up_(base, t, b, scale, dropout_p, seed)
    elif narrow:
        base.copy_(base.float().addmm_(t, b.t(), alpha=scale))
    else:
        base.addmm_(t, b.t(), alpha=scale)


_PRODUCTS = autograd.Products(
    _down_of, torch.ops.foundry_kernels.lora_up.default, torch.ops.foundry_kernels.lora_outer.default, _add_to
)

lora_linear = partial(autograd.lora_linear, _PRODUCTS)
