"""lora_linear on a CPU."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from foundry_kernels.core.dropout import DropoutOptions
from foundry_kernels.core.dropout import dropout as drop
from foundry_kernels.ops.lora_linear.autograd import Products
from foundry_kernels.ops.lora_linear.autograd import lora_linear as _lora_linear


def _wide(x: Tensor, dtype: torch.dtype, dropout: DropoutOptions) -> Tensor:
    return x.to(dtype) if dropout.dropout_seed is None else drop(x, dropout.dropout_p, dropout.dropout_seed)


def _down(x: Tensor, a: Tensor, dropout: DropoutOptions) -> Tensor:
    return _wide(x, a.dtype, dropout) @ a.t()


def _up(out: Tensor, t: Tensor, b: Tensor, scale: float, dropout: DropoutOptions, in_place: bool) -> Tensor:
    wide = t.dtype
    if dropout.dropout_seed is not None:
        add = drop(t @ b.t(), dropout.dropout_p, dropout.dropout_seed)
        y = (out.to(wide) + scale * add).to(out.dtype)
    elif out.dtype == wide and not in_place:
        return torch.addmm(out, t, b.t(), alpha=scale)
    elif out.dtype == wide:
        return out.addmm_(t, b.t(), alpha=scale)
    else:
        y = out.to(wide).addmm_(t, b.t(), alpha=scale).to(out.dtype)
    return out.copy_(y) if in_place else y


def _outer(t: Tensor, x: Tensor, dropout: DropoutOptions) -> Tensor:
    return t.t() @ _wide(x, t.dtype, dropout)


lora_linear = partial(_lora_linear, Products(_down, _up, _outer))
