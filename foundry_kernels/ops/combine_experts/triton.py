"""combine_experts in Triton.

Forward: a program computes a block of tokens and columns; it adds the rows of their slots in order. Backward: a program
takes some slots, writes the gradients of their rows, and sums the products with x. It marks the rows that slots name;
one more kernel writes zeros to the others. So every row is written once, and there are no atomics.

Names: b_ is a block of values, m_ a mask.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._triton.functions import round_to
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import apply, define
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.inference import refuse_second_derivative

#: The compiler does not specialise on these: it would compile more kernels without making them faster.
_PLAIN = ("n_rows", "n_tokens", "n_slots")
#: Rows of a token that are loaded at the same time.
_MOST_AT_A_TIME = 8


@triton.jit(do_not_specialize=_PLAIN)
def combine_experts_fwd_kernel(
    x_ptr, weights_ptr, slots_ptr, y_ptr,
    n_rows, n_tokens, n_cols, n_tiles, k, stride_x,
    COMPUTE: tl.constexpr, AT_A_TIME: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    tokens = (program // n_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
    cols = ((program % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]  # [1, C]
    live = tokens < n_tokens
    m_cols = cols < n_cols
    b_y = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
    b_wrong = tl.zeros([BLOCK_ROWS], tl.int32)
    for first in range(0, k, AT_A_TIME):
        for i in tl.static_range(AT_A_TIME):
            j = first + i
            named = live & (tl.zeros([1], tl.int32) + j < k)  # Triton 3.9's interpreter has no scalar masks
            b_slot = tl.load(slots_ptr + tokens * k + j, mask=named, other=-1).to(tl.int64)
            named = (b_slot >= 0) & (b_slot < n_rows)
            b_wrong |= (b_slot >= n_rows).to(tl.int32)
            b_x = tl.load(x_ptr + (b_slot * stride_x)[:, None] + cols, mask=named[:, None] & m_cols, other=0.0)
            if weights_ptr is None:
                b_y += b_x.to(COMPUTE)
            else:
                b_weight = tl.load(weights_ptr + tokens * k + j, mask=named, other=0.0).to(COMPUTE)
                b_y += b_weight[:, None] * b_x.to(COMPUTE)
    b_y = tl.where((b_wrong > 0)[:, None], float("nan"), b_y)
    tl.store(
        y_ptr + (tokens * n_cols)[:, None] + cols, round_to(b_y, y_ptr.dtype.element_ty), mask=live[:, None] & m_cols
    )


@triton.jit(do_not_specialize=_PLAIN)
def combine_experts_bwd_kernel(
    dy_ptr, x_ptr, weights_ptr, slots_ptr, dx_ptr, named_ptr, dweights_ptr,
    n_rows, n_slots, n_cols, k, stride_dy, stride_x,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """dx, with named_ptr [n_rows], and dweights may be None."""
    at = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
    b_slot = tl.load(slots_ptr + at, mask=at < n_slots, other=-1).to(tl.int64)
    named = (b_slot >= 0) & (b_slot < n_rows)
    if dx_ptr is not None:
        tl.store(named_ptr + b_slot, tl.full([BLOCK_ROWS], 1, tl.uint8), mask=named)
        b_weight = tl.full([BLOCK_ROWS], 1.0, COMPUTE)
        if weights_ptr is not None:
            b_weight = tl.load(weights_ptr + at, mask=named, other=0.0).to(COMPUTE)
    b_sum = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
    for first in range(0, n_cols, BLOCK_COLS):
        cols = (first + tl.arange(0, BLOCK_COLS))[None, :]
        mask = named[:, None] & (cols < n_cols)
        b_dy = tl.load(dy_ptr + (at // k * stride_dy)[:, None] + cols, mask=mask, other=0.0).to(COMPUTE)
        if dweights_ptr is not None:
            b_x = tl.load(x_ptr + (b_slot * stride_x)[:, None] + cols, mask=mask, other=0.0).to(COMPUTE)
            b_sum += b_x * b_dy
        if dx_ptr is not None:
            b_dx = round_to(b_weight[:, None] * b_dy, dx_ptr.dtype.element_ty)
            tl.store(dx_ptr + (b_slot * n_cols)[:, None] + cols, b_dx, mask=mask)
    if dweights_ptr is not None:
        b_dweight = tl.where(b_slot >= n_rows, float("nan"), tl.sum(b_sum, 1))
        tl.store(dweights_ptr + at, round_to(b_dweight, dweights_ptr.dtype.element_ty), mask=at < n_slots)


@triton.jit(do_not_specialize=_PLAIN)
def combine_experts_rest_kernel(
    named_ptr, dx_ptr, n_rows, n_cols, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):  # fmt: skip
    """Writes zeros to the rows of dx that no slot names."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rest = tl.load(named_ptr + rows, mask=rows < n_rows, other=1) == 0
    needed = tl.where(tl.max(rest.to(tl.int32), 0) == 1, n_cols, 0)
    b_zero = tl.zeros([BLOCK_ROWS, BLOCK_COLS], dx_ptr.dtype.element_ty)
    for first in range(0, needed, BLOCK_COLS):
        cols = (first + tl.arange(0, BLOCK_COLS))[None, :]
        tl.store(dx_ptr + (rows * n_cols)[:, None] + cols, b_zero, mask=rest[:, None] & (cols < n_cols))


def tiles(n_cols: int) -> list[dict[str, int]]:
    """Returns launch configs: the default, then those that `python -m foundry_kernels tune` tries. A thread has 8
    elements of a row, or 16. They do not depend on the number of rows, so that a row is summed in the same order in any
    batch."""
    found: list[dict[str, int]] = []
    for widest, elements, warps in ((1024, 1024, 4), (512, 512, 2), (2048, 2048, 8), (2048, 2048, 4)):
        cols = min(widest, triton.next_power_of_2(n_cols))
        block = max(elements // cols, 1)
        row = {"BLOCK_ROWS": block, "BLOCK_COLS": cols, "num_warps": warps}
        if row not in found:
            found.append(row)
    return found


def _row_stride(x: Tensor) -> Tensor:
    """x, or a copy if its rows are not contiguous."""
    return x if x.stride(1) == 1 else x.contiguous()


@planned
def _plan_fwd(
    shape: tuple[int, ...], k: int, n_rows: int, stride: int, dtype: torch.dtype, device: torch.device
) -> Plan:
    n_tokens, n_cols = shape
    at_a_time = min(_MOST_AT_A_TIME, triton.next_power_of_2(k))
    tags = f"{8 * dtype.itemsize}-bit {at_a_time} rows"
    block = choose("combine_experts_fwd_kernel", tags, tiles(n_cols), device)
    n_tiles = triton.cdiv(n_cols, block["BLOCK_COLS"])
    constants = {"COMPUTE": compute_dtype(dtype), "AT_A_TIME": at_a_time, **block}
    grid = triton.cdiv(n_tokens, block["BLOCK_ROWS"]) * n_tiles
    return Plan((grid,), (n_rows, n_tokens, n_cols, n_tiles, k, stride), constants)


def _empty_fwd(x: Tensor, slots: Tensor) -> Tensor:
    return x.new_empty(slots.shape[0], x.shape[1])


def _fwd(x: Tensor, weights: Tensor | None, slots: Tensor) -> Tensor:
    y = _empty_fwd(x, slots)
    if y.numel() == 0:
        return y
    x = _row_stride(x)
    plan = _plan_fwd(y.shape, slots.shape[1], x.shape[0], x.stride(0), x.dtype, x.device)
    launch(combine_experts_fwd_kernel, plan, x, contiguous(weights), slots.contiguous(), y)
    return y


@planned
def _plan_bwd(
    n_slots: int, k: int, shape: tuple[int, ...], strides: tuple[int, int], dtype: torch.dtype, device: torch.device,
    needed: tuple[bool, bool],
) -> Plan:  # fmt: skip
    n_rows, n_cols = shape
    tags = f"{8 * dtype.itemsize}-bit" + " dx" * needed[0] + " dweights" * needed[1]
    block = choose("combine_experts_bwd_kernel", tags, tiles(n_cols), device)
    grid = triton.cdiv(n_slots, block["BLOCK_ROWS"])
    return Plan((grid,), (n_rows, n_slots, n_cols, k, *strides), {"COMPUTE": compute_dtype(dtype), **block})


@planned
def _plan_rest(shape: tuple[int, ...]) -> Plan:
    n_rows, n_cols = shape
    block = {
        "BLOCK_ROWS": min(32, triton.next_power_of_2(n_rows)),
        "BLOCK_COLS": min(128, triton.next_power_of_2(n_cols)),
    }
    return Plan((triton.cdiv(n_rows, block["BLOCK_ROWS"]),), (n_rows, n_cols), {**block, "num_warps": 4})


def _empty_bwd(
    x: Tensor, weights: Tensor | None, need_dx: bool, need_dweights: bool
) -> tuple[Tensor | None, Tensor | None]:
    dweights = weights.new_empty(weights.shape) if need_dweights and weights is not None else None
    return x.new_empty(x.shape) if need_dx else None, dweights


def _bwd(
    dy: Tensor, x: Tensor, weights: Tensor | None, slots: Tensor, need_dx: bool, need_dweights: bool
) -> tuple[Tensor | None, Tensor | None]:
    dx, dweights = _empty_bwd(x, weights, need_dx, need_dweights)
    if dx is None and dweights is None:
        return dx, dweights
    if x.numel() == 0 or slots.numel() == 0:
        return None if dx is None else dx.zero_(), None if dweights is None else dweights.zero_()
    dy, x = _row_stride(dy), _row_stride(x)
    named = None if dx is None else torch.zeros(x.shape[0], dtype=torch.uint8, device=x.device)
    plan = _plan_bwd(
        slots.numel(), slots.shape[1], x.shape, (dy.stride(0), x.stride(0)), x.dtype, x.device,
        (dx is not None, dweights is not None),
    )  # fmt: skip
    launch(
        combine_experts_bwd_kernel, plan, dy, x, contiguous(weights), slots.contiguous(), dx, named, dweights
    )  # fmt: skip
    if dx is not None:
        launch(combine_experts_rest_kernel, _plan_rest(dx.shape), named, dx)
    return dx, dweights


_combine_experts_fwd = define(
    "triton_combine_experts_fwd(Tensor x, Tensor? weights, Tensor slots) -> Tensor", _fwd, _empty_fwd
)
_combine_experts_bwd = define(
    "triton_combine_experts_bwd(Tensor dy, Tensor x, Tensor? weights, Tensor slots, bool need_dx, bool need_dweights) "
    "-> (Tensor dx, Tensor dweights)",
    _bwd,
    _empty_bwd,
)


class _CombineExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, slots: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, slots)
        return _combine_experts_fwd(x, weights, slots)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_derivative("combine_experts")
        x, weights, slots = ctx.saved_tensors
        need_dx, need_dweights, _ = ctx.needs_input_grad
        dx, dweights = _combine_experts_bwd(dy, x, weights, slots, need_dx, need_dweights)
        return dx if need_dx else None, dweights if need_dweights else None, None


def combine_experts(x: Tensor, weights: Tensor | None, slots: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or (weights is not None and weights.requires_grad)):
        return apply(_CombineExperts, x, weights, slots)
    return _combine_experts_fwd(x, weights, slots)
