"""PyTorch's gelu and silu."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_float
from foundry_kernels.ops.bias_gelu import bias_gelu
from foundry_kernels.ops.swiglu import swiglu


def gelu(input: Tensor, approximate: str = "none", *, backend: str = "auto") -> Tensor:
    """``torch.nn.functional.gelu`` on the kernel of :func:`foundry_kernels.bias_gelu`.

    Args:
        input: float32, bfloat16, float16 or float64, any shape.
        approximate: "none" or "tanh".
        backend: "auto", "reference", "triton" or "native".

    Returns:
        A contiguous tensor of input's shape and dtype.

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.
    """
    check_float("input", input)
    y = bias_gelu(input.view(1) if input.dim() == 0 else input, approximate=approximate, backend=backend)
    return y.view(input.shape)


def silu(input: Tensor, inplace: bool = False, *, backend: str = "auto") -> Tensor:
    """``torch.nn.functional.silu`` on the kernel of :func:`foundry_kernels.swiglu`, with a row of ones for its `up`.

    Args:
        input: float32, bfloat16, float16 or float64, any shape.
        inplace: whether the result overwrites `input`, which is returned. This saves no memory: the result is copied
            there, and if a gradient is needed `input` is copied for the backward pass.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        A contiguous tensor of input's shape and dtype, or `input`.

    Raises:
        TypeError, ValueError: an argument does not fit. RuntimeError: `input` is a leaf that requires a gradient, or
            elements of it share memory, and `inplace`.
        BackendUnavailable: the named backend does not support this device or dtype.
    """
    check_float("input", input)
    x = input.view(1) if input.dim() == 0 else input
    if inplace and torch.is_grad_enabled() and input.requires_grad:
        if input.is_leaf:
            raise RuntimeError("input must not be a leaf that requires a gradient where inplace=True")
        x = x.clone()
    ones = x.new_ones(x.shape[-1:]).expand(x.shape)
    y = swiglu(x, ones, backend=backend).view(input.shape)
    return input.copy_(y) if inplace else y
