"""Matrix products in float32 on a CPU: PyTorch's or, where those leave half of the processor unused
(`csrc/torch/products.h`), the extension's."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.core.registry import short_dtype

#: out = a b, or out += a b
matmul = extension.operator("matmul_")


@functools.cache
def fast_products(dtype: torch.dtype) -> bool:
    """Whether PyTorch's products of `dtype` take all that the processor has for them."""
    return short_dtype(dtype) in extension.build_info().get("fast_products", ())


def own_products(x: Tensor) -> bool:
    """Whether products of `x` are the extension's."""
    if torch.compiler.is_compiling() or matmul is None:
        return False
    return x.is_cpu and x.dtype == torch.float32 and not fast_products(x.dtype)


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """Returns a b, in `out` where that is given; with `add`, out += a b. Without a gradient."""
    if own_products(a):
        assert matmul is not None
        out = a.new_empty((a.shape[0], b.shape[1])) if out is None else out
        matmul(out, a, b, add)
        return out
    if add:
        assert out is not None
        return out.addmm_(a, b)
    return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)
