"""Matmuls on a CPU. They are PyTorch's, or the extension's (`csrc/torch/products.h`) where PyTorch's float32 matmuls
leave half of the processor unused or its bfloat16 matmuls are slower than float32. Also 16-bit matmuls with a float32
sum."""

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
    """Whether PyTorch's matmuls of `dtype` use the full rate of the processor."""
    return short_dtype(dtype) in extension.build_info().get("fast_products", ())


@functools.cache
def has_own_products(dtype: torch.dtype) -> bool:
    """Whether the extension's matmuls of `dtype` are faster than PyTorch's here."""
    return matmul is not None and short_dtype(dtype) in extension.build_info().get("own_products", ())


def own_products(x: Tensor) -> bool:
    """Whether matmuls of `x` run on the extension."""
    return not torch.compiler.is_compiling() and x.is_cpu and has_own_products(x.dtype)


def multiply(a: Tensor, b: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
    """Returns a b, in `out` if that is given; with `add`, out += a b. There is no gradient."""
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
    """Whether PyTorch has 16-bit matmuls with a float32 result on x's device, which only CUDA has."""
    return x.is_cuda


def accumulate(total: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, *, new: bool = False) -> None:
    """total += scale a b, or total = scale a b if it is `new`. A float32 total of 16-bit a and b adds their unrounded
    matmul. On a GPU the matmul accumulates into `total`, without a temporary."""
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
