"""Shared code of launchers: rows as at most three strides, memory, dtypes, and sums of partial results."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from foundry_kernels._triton.functions import sum_partials_kernel
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels.core.layout import is_contiguous


def compute_dtype(dtype: torch.dtype) -> Any:
    """The dtype of a kernel's arithmetic."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def row_strides(
    shape: tuple[int, ...], *strides: tuple[int, ...] | None
) -> tuple[int, int, int, list[tuple[int, int, int]]] | None:
    """Finds at most three strides that reach the rows (all dimensions but the last) of tensors of one shape.

    Returns `(rank, n1, n2, strides)` for `row_offset`, where `strides` has one triple for each tensor (zeros for None).
    Returns None if the tensors need more than three dimensions or have a last stride other than 1.
    """
    present = [s for s in strides if s is not None]
    width = shape[-1]
    if all(is_contiguous(shape, s) for s in present):
        return 1, 1, 1, [(0, 0, 0) if s is None else (0, 0, width) for s in strides]
    if any(s[-1] != 1 and width > 1 for s in present):
        return None
    dims: list[tuple[int, list[int]]] = []  # (size, strides of the tensors present), outermost first
    for axis in range(len(shape) - 1):
        size, along = shape[axis], [s[axis] for s in present]
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], along, strict=True)):
            dims[-1] = (dims[-1][0] * size, along)
        else:
            dims.append((size, along))
    if len(dims) > 3:
        return None
    rank = max(1, len(dims))
    dims = [(1, [0] * len(present))] * (3 - len(dims)) + dims
    each = iter(zip(*(along for _, along in dims), strict=True))
    return rank, dims[1][0], dims[2][0], [(0, 0, 0) if s is None else next(each) for s in strides]


def strides_of(x: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if x is None else x.stride()


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """A contiguous, uninitialized tensor of x's shape and dtype; the fastest way to allocate one."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


@planned
def _plan_sum(parts: int, width: int, dtype: torch.dtype) -> Plan:
    # Each program reads one cache line of each part, so that many multiprocessors work: 3 dependent steps on an H100.
    constants = {"COMPUTE": compute_dtype(dtype), "BLOCK_ROWS": 128, "BLOCK_COLS": 32, "num_warps": 8}
    return Plan((triton.cdiv(width, 32),), (parts, width), constants)


def sum_partials(partial: torch.Tensor, out: torch.Tensor) -> None:
    """out [N] = the sum over p of partial [p, N], rounded: the partial sums of a grid's programs."""
    launch(sum_partials_kernel, _plan_sum(*partial.shape, partial.dtype), partial, out)
