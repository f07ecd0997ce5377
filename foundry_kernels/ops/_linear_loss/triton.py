"""Losses whose row kernels are in Triton, between PyTorch's matmuls. A kernel scales their gradients in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._triton.functions import round_to
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import define, on_its_device
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype
from foundry_kernels.ops._linear_loss.operators import make_backend
from foundry_kernels.ops._linear_loss.problem import Loss, RowKernel

_SCALE = 4096  # elements of a program


@triton.jit
def linear_loss_scale_kernel(x_ptr, factor_ptr, n, COMPUTE: tl.constexpr, BLOCK: tl.constexpr):
    """x *= factor in place. A factor of 1, which only the device knows, costs nothing."""
    factor = tl.load(factor_ptr).to(COMPUTE)
    if factor != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        b_x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(COMPUTE) * factor
        tl.store(x_ptr + at, round_to(b_x, x_ptr.dtype.element_ty), mask=at < n)


@planned
def _plan_scale(n: int, dtype: torch.dtype) -> Plan:
    constants = {"COMPUTE": compute_dtype(dtype), "BLOCK": _SCALE, "num_warps": 8}
    return Plan((triton.cdiv(n, _SCALE),), (n,), constants)


@on_its_device
def scale_(x: Tensor, factor: Tensor) -> None:
    """Multiplies contiguous x in place by a number on the device."""
    if x.numel():
        launch(linear_loss_scale_kernel, _plan_scale(x.numel(), x.dtype), x, factor)


def triton_backend(loss: Loss, rows: type[RowKernel]) -> Callable[..., dict[str, Tensor]]:
    return make_backend(loss, rows, "triton_", define, scale_)
