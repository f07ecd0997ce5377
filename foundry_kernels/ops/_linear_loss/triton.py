"""Losses whose row kernels are in Triton, between PyTorch's matmuls. A kernel scales their gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._triton.devices import programs
from foundry_kernels._triton.functions import round_to
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import define, on_its_device
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype
from foundry_kernels.ops._linear_loss.operators import make_backend
from foundry_kernels.ops._linear_loss.problem import Loss, RowKernel

#: Elements of a block, and how many times `programs` run: with a program for each block, a factor of 1 would still
#: start 128,256 of them for the gradient of Llama 3's head.
_SCALE, _PROGRAMS = 4096, 4


@triton.jit
def linear_loss_scale_kernel(
    x_ptr, factor_ptr, out_ptr, n, IN_PLACE: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr
):
    """out = x * factor, rounded once. In place, a factor of 1, which only the device knows, costs nothing."""
    factor = tl.load(factor_ptr).to(COMPUTE)
    if IN_PLACE:
        n = tl.where(factor == 1.0, 0, n)
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        b_x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(COMPUTE) * factor
        tl.store(out_ptr + at, round_to(b_x, out_ptr.dtype.element_ty), mask=at < n)


@planned
def _plan_scale(n: int, dtype: torch.dtype, device: torch.device, in_place: bool) -> Plan:
    constants = {"IN_PLACE": in_place, "COMPUTE": compute_dtype(dtype), "BLOCK": _SCALE, "num_warps": 8}
    return Plan((min(triton.cdiv(n, _SCALE), _PROGRAMS * programs(device)),), (n,), constants)


@on_its_device
def scale(x: Tensor, factor: Tensor, out: Tensor) -> None:
    """out = x * factor, a number on the device. Both tensors are contiguous, and may be one."""
    if x.numel():
        plan = _plan_scale(x.numel(), out.dtype, out.device, out is x)
        launch(linear_loss_scale_kernel, plan, x, factor, out)


def triton_backend(loss: Loss, rows: type[RowKernel]) -> Callable[..., dict[str, Tensor]]:
    return make_backend(loss, rows, "triton_", define, scale)
