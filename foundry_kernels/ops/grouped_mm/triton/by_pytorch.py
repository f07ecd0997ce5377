"""The gradients by PyTorch's grouped matmuls (CUTLASS), where they measured faster than this package's kernels on a
GPU.

Like these, they do not synchronize with the host, sum in float32, round once and are deterministic. This module handles
the cases that they do not support: invalid ends of groups (they would read out of bounds), rows of x in no group (they
do not write the gradient), and matrices of empty groups (the gradient is unspecified).
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn import functional

from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels.ops.grouped_mm.layout import transposed
from foundry_kernels.ops.grouped_mm.triton.kernels import grouped_mm_ends_kernel, grouped_mm_zeros_kernel

#: Fewer rows in a group and narrower matrices have not been compared. PyTorch refuses 1024 groups.
_LEAST_ROWS, _LEAST_WIDTH, _MOST_GROUPS = 128, 128, 1023


def is_faster(dtype: torch.dtype, arch: int, n_rows: int, weight_shape: tuple[int, ...], batch_invariant: bool) -> bool:
    """Whether these gradients are used. On an H100, both gradients for 16384 bfloat16 rows reach, in TFLOP/s, with this
    package's kernels and with PyTorch: 562 and 722 for 8 matrices of 4096 x 14336; 341 and 409 for 64 of 2048 x 1408.

    Only for compute capability 9.0: on others PyTorch has not been measured, waits for the sizes on the host (8.x), or
    has returned gradients of empty groups (10.0). In other dtypes it waits too. Batch-invariant calls use this
    package's kernels, whose tiles are the same for any number of rows."""
    n_groups, n_in, n_out = weight_shape
    return (
        arch == 90
        and dtype == torch.bfloat16
        and not batch_invariant
        and n_groups <= _MOST_GROUPS
        and n_rows >= _LEAST_ROWS * n_groups
        and min(n_in, n_out) >= _LEAST_WIDTH
        and n_in % 8 == n_out % 8 == 0  # rows of the results are aligned to 16 bytes
    )


def _laid_out(x: Tensor) -> Tensor:
    """x, or a copy if PyTorch would refuse its layout: the last or the last but one dimension must be dense, the other
    must not overlap, and all must be aligned to 16 bytes."""
    *outer, down, across = x.stride()
    dense = (across == 1 and down >= x.shape[-1]) or (down == 1 and across >= x.shape[-2])
    aligned = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in (*outer, max(down, across)))
    return x if dense and aligned else x.clone(memory_format=torch.contiguous_format)


def _rows_laid_out(x: Tensor) -> Tensor:
    """`_laid_out` with dense rows. If both operands are ragged, PyTorch accepts empty groups only if both have dense
    rows."""
    return _laid_out(x if x.stride(1) == 1 else x.contiguous())


@planned
def _plan_ends(n_rows: int, n_groups: int) -> Plan:
    return Plan((1,), (n_rows, n_groups), {"GROUPS": triton.next_power_of_2(n_groups)})


@planned
def _plan_zeros(n_rows: int, n_groups: int, n_in: int, n_out: int) -> Plan:
    programs = 64  # for each group: enough to write a matrix of 100 MB at memory speed; most groups are not empty
    numbers = (n_rows, n_groups, n_in, n_in * n_out)
    return Plan(((n_groups + 1) * programs,), numbers, {"PROGRAMS": programs, "BLOCK": 1024})


@torch.no_grad()
def gradients(
    dy: Tensor, x: Tensor, weight: Tensor, offs: Tensor, need_dx: bool, need_dweight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x and weight. The gradient of weight has weight's memory layout."""
    n_rows, (n_groups, n_in, n_out) = x.shape[0], weight.shape
    ends = torch.empty_like(offs)
    launch(grouped_mm_ends_kernel, _plan_ends(n_rows, n_groups), offs, ends)
    dy, dx, dweight = _rows_laid_out(dy), None, None
    with torch.autocast(x.device.type, enabled=False):
        if need_dx:
            dx = functional.grouped_mm(dy, _laid_out(weight.transpose(1, 2)), offs=ends)
        if need_dweight:
            a, b = (dy, _rows_laid_out(x)) if transposed(weight) else (_rows_laid_out(x), dy)
            dweight = functional.grouped_mm(a.t(), b, offs=ends)
    launch(grouped_mm_zeros_kernel, _plan_zeros(n_rows, n_groups, n_in, n_out), ends, dx, dweight)
    return dx, dweight.transpose(1, 2) if dweight is not None and transposed(weight) else dweight
