"""Matrix products on a CPU: PyTorch's or, where those in float32 leave half of the processor unused or those of
bfloat16 are slower than they (`csrc/torch/products.h`), the extension's. And products of 16 bits with a float32 sum."""

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


@functools.cache
def has_own_products(dtype: torch.dtype) -> bool:
    """Whether the extension's products of `dtype` are faster than PyTorch's here."""
    return matmul is not None and short_dtype(dtype) in extension.build_info().get("own_products", ())


def own_products(x: Tensor) -> bool:
    """Whether products of `x` are the extension's."""
    return not torch.compiler.is_compiling() and x.is_cpu and has_own_products(x.dtype)


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


def sums_in_float32(x: Tensor) -> bool:
    """Whether PyTorch has products of 16 bits with a float32 sum on x's device: on CUDA's alone."""
    return x.is_cuda


def accumulate(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, *, new: bool = False) -> None:
    """total = scale a b, with what `total` held added unless it is `new`. A float32 total of 16-bit a and b takes their
    product unrounded: on a GPU by the product itself, which reads and writes it and makes nothing beside it."""
    beta = 0 if new else 1
    if a.dtype == total.dtype:
        total.addmm_(a, b, beta=beta, alpha=scale)
    elif not sums_in_float32(a):
        total.addmm_(a.to(total.dtype), b.to(total.dtype), beta=beta, alpha=scale)
    elif torch.compiler.is_compiling():  # Inductor has no addmm with a dtype
        product = torch.mm(a, b, out_dtype=total.dtype)
        total.copy_(product.mul_(scale)) if new else total.add_(product, alpha=scale)
    else:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=beta, alpha=scale, out=total)
