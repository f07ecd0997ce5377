"""grouped_mm in Triton: one launch for all groups, whose sizes are unknown on the host.

The forward pass and the gradient of x use the same kernel. It takes the strides of the matrices, so that transposed
matrices are not copied. The gradient of the matrices has their memory layout; for transposed matrices the two operands
are exchanged. On an H100 large bfloat16 gradients run on PyTorch (see `by_pytorch.is_faster`).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.devices import capability
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import apply, define
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.grouped_mm.layout import empty_dweight, transposed
from foundry_kernels.ops.grouped_mm.triton import by_pytorch
from foundry_kernels.ops.grouped_mm.triton.config import dweight_tiles, tiles
from foundry_kernels.ops.grouped_mm.triton.kernels import grouped_mm_dweight_kernel, grouped_mm_kernel

#: Rows of tiles in a band; see `kernels._swizzled`.
_TOGETHER = 8


def most_tiles(rows: int, groups: int, block: int) -> int:
    """Returns an upper bound on the number of tiles of `block` rows for any group sizes. Rows in no group count as one
    more group."""
    some = min(groups + 1, rows)  # groups with rows; only a group's last tile may be partial
    return (rows + some * (block - 1)) // block


def _rows(x: Tensor) -> Tensor:
    """x, or a copy if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


def _aligned(*numbers: int) -> bool:
    return all(number % 16 == 0 for number in numbers)


@planned
def _plan(
    x_strides: tuple[int, ...],
    weight_shape: tuple[int, ...],
    weight_strides: tuple[int, ...],
    n_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    batch_invariant: bool,
) -> Plan:
    n_groups, n_in, n_out = weight_shape
    aligned = _aligned(n_in, n_out, x_strides[0], *(stride for stride in weight_strides if stride != 1))
    rows = tiles(dtype, capability(device), None if batch_invariant else triton.cdiv(n_rows, n_groups), aligned)
    layout = "" if weight_strides[2] == 1 else " transposed"
    tags = f"{8 * dtype.itemsize}-bit{layout}{' batch-invariant' if batch_invariant else ''}"
    block = choose("grouped_mm_kernel", tags, rows, device)
    grid = most_tiles(n_rows, n_groups, block["BLOCK_M"]) * triton.cdiv(n_out, block["BLOCK_N"])
    constants = dict(
        WHOLE_K=n_in % block["BLOCK_K"] == 0, WHOLE_N=n_out % block["BLOCK_N"] == 0,
        TRANSPOSED=weight_strides[2] != 1, COMPUTE=compute_dtype(dtype),
        GROUPS=triton.next_power_of_2(n_groups + 1), TOGETHER=_TOGETHER, **block,
    )  # fmt: skip
    return Plan((grid,), (n_rows, n_groups, n_in, n_out, x_strides[0], *weight_strides), constants)


def _product(x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[2])
    if y.numel() == 0:
        return y
    if x.shape[1] == 0:
        return y.zero_()
    x = x.contiguous() if batch_invariant else _rows(x)  # tiles also depend on the alignment of rows
    weight = weight if 1 in weight.stride()[1:] else weight.contiguous()
    plan = _plan(x.stride(), weight.shape, weight.stride(), x.shape[0], x.dtype, x.device, batch_invariant)
    launch(grouped_mm_kernel, plan, x, weight, offs, y)
    return y


@planned
def _plan_dweight(
    n_a: int, n_b: int, n_groups: int, n_rows: int, stride_a: int, stride_b: int, dtype: torch.dtype,
    device: torch.device,
) -> Plan:  # fmt: skip
    rows = dweight_tiles(dtype, capability(device), _aligned(n_a, n_b, stride_a, stride_b))
    block = choose("grouped_mm_dweight_kernel", f"{8 * dtype.itemsize}-bit", rows, device)
    n_tiles = triton.cdiv(n_a, block["BLOCK_A"]) * triton.cdiv(n_b, block["BLOCK_B"])
    whole = n_a % block["BLOCK_A"] == 0 and n_b % block["BLOCK_B"] == 0
    constants = dict(WHOLE=whole, COMPUTE=compute_dtype(dtype), TOGETHER=_TOGETHER, **block)
    return Plan((n_groups * n_tiles,), (n_rows, n_groups, n_a, n_b, stride_a, stride_b), constants)


def _dweight(dy: Tensor, x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    dweight = empty_dweight(weight)
    if dweight.numel() == 0:
        return dweight
    if x.shape[0] == 0:
        return dweight.zero_()
    a, b = (dy, x) if transposed(weight) else (x, dy)
    a, b = _rows(a), _rows(b)
    plan = _plan_dweight(
        a.shape[1], b.shape[1], weight.shape[0], a.shape[0], a.stride(0), b.stride(0), x.dtype, x.device
    )
    launch(grouped_mm_dweight_kernel, plan, a, b, offs, dweight)
    return dweight


def _empty_fwd(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


def _fwd(x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool) -> Tensor:
    return _product(x, weight, offs.contiguous(), batch_invariant)


def _by_pytorch(x: Tensor, weight: Tensor, batch_invariant: bool) -> bool:
    arch = capability(x.device) if x.is_cuda else 0  # records launches of this package's kernels
    return by_pytorch.is_faster(x.dtype, arch, x.shape[0], weight.shape, batch_invariant)


def _empty_bwd(x: Tensor, weight: Tensor, need_dx: bool, need_dweight: bool) -> tuple[Tensor | None, Tensor | None]:
    return x.new_empty(x.shape) if need_dx else None, empty_dweight(weight) if need_dweight else None


def _bwd(
    dy: Tensor, x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool, need_dx: bool, need_dweight: bool
) -> tuple[Tensor | None, Tensor | None]:
    offs = offs.contiguous()
    if _by_pytorch(x, weight, batch_invariant):
        return by_pytorch.gradients(dy, x, weight, offs, need_dx, need_dweight)
    dx = _product(dy, weight.transpose(1, 2), offs, batch_invariant) if need_dx else None
    return dx, _dweight(dy, x, weight, offs) if need_dweight else None


_grouped_mm_fwd = define(
    "triton_grouped_mm_fwd(Tensor x, Tensor weight, Tensor offs, bool batch_invariant) -> Tensor", _fwd, _empty_fwd
)
_grouped_mm_bwd = define(
    "triton_grouped_mm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor offs, bool batch_invariant, bool need_dx, "
    "bool need_dweight) -> (Tensor dx, Tensor dweight)",
    _bwd,
    _empty_bwd,
)


class _GroupedMm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool) -> Tensor:
        ctx.save_for_backward(x, weight, offs)
        ctx.batch_invariant = batch_invariant
        return _grouped_mm_fwd(x, weight, offs, batch_invariant)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_derivative("grouped_mm")
        need_dx, need_dweight, *_ = ctx.needs_input_grad
        dx, dweight = _grouped_mm_bwd(dy, *ctx.saved_tensors, ctx.batch_invariant, need_dx, need_dweight)
        return dx if need_dx else None, dweight if need_dweight else None, None, None


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor, batch_invariant: bool) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return apply(_GroupedMm, x, weight, offs, batch_invariant)
    return _grouped_mm_fwd(x, weight, offs, batch_invariant)
