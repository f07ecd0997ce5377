"""SwiGLU and GEGLU in Triton.

One kernel forward and one backward serve the three activations. A program takes a block of at most 1024 elements of
some rows; contiguous tensors are one long row. The halves of a packed tensor are views of it, and so are those of its
gradient, which is thereby written packed.

Names: n1, n2 and stride_gate0, stride_gate1, stride_gate2 are what `row_offset` needs to find a row of gate; b_ is a
block of values, o_ offsets.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._activation import derivative, share
from foundry_kernels._launch import Plan, launch, planned
from foundry_kernels._triton import (
    compute_dtype,
    define,
    empty_like,
    refuse_second_derivative,
    round_to,
    row_offset,
    row_strides,
)
from foundry_kernels.tuning import choose


@triton.jit
def _block(n_rows, n_cols, n_tiles, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """This program's rows [R], columns [1, C] and mask [R, C]. The tiles of a row follow each other."""
    program = tl.program_id(0)
    rows = (program // n_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = ((program % n_tiles).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    return rows, cols, (rows < n_rows)[:, None] & (cols < n_cols)


@triton.jit
def glu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr,
    n_rows, n_cols, n_tiles, n1, n2, stride_gate0, stride_gate1, stride_gate2, stride_up0, stride_up1, stride_up2,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows, cols, mask = _block(n_rows, n_cols, n_tiles, BLOCK_ROWS, BLOCK_COLS)
    o_gate = row_offset(rows, n1, n2, stride_gate0, stride_gate1, stride_gate2, RANK)[:, None] + cols
    o_up = row_offset(rows, n1, n2, stride_up0, stride_up1, stride_up2, RANK)[:, None] + cols
    b_g = tl.load(gate_ptr + o_gate, mask=mask, other=0.0).to(COMPUTE)
    b_u = tl.load(up_ptr + o_up, mask=mask, other=0.0).to(COMPUTE)
    b_y = b_g * share(b_g, ACTIVATION) * b_u
    tl.store(y_ptr + (rows * n_cols)[:, None] + cols, round_to(b_y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def glu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, out_stride,
    n_rows, n_cols, n_tiles, n1, n2, stride_dy0, stride_dy1, stride_dy2, stride_gate0, stride_gate1, stride_gate2,
    stride_up0, stride_up1, stride_up2,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, NEED_DGATE: tl.constexpr, NEED_DUP: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """`out_stride` is the distance between rows of dgate, and of dup."""
    rows, cols, mask = _block(n_rows, n_cols, n_tiles, BLOCK_ROWS, BLOCK_COLS)
    o_dy = row_offset(rows, n1, n2, stride_dy0, stride_dy1, stride_dy2, RANK)[:, None] + cols
    o_gate = row_offset(rows, n1, n2, stride_gate0, stride_gate1, stride_gate2, RANK)[:, None] + cols
    o_out = (rows * out_stride)[:, None] + cols
    b_dy = tl.load(dy_ptr + o_dy, mask=mask, other=0.0).to(COMPUTE)
    b_g = tl.load(gate_ptr + o_gate, mask=mask, other=0.0).to(COMPUTE)
    b_share = share(b_g, ACTIVATION)
    if NEED_DGATE:
        o_up = row_offset(rows, n1, n2, stride_up0, stride_up1, stride_up2, RANK)[:, None] + cols
        b_u = tl.load(up_ptr + o_up, mask=mask, other=0.0).to(COMPUTE)
        b_dgate = b_dy * b_u * derivative(b_g, b_share, ACTIVATION)
        tl.store(dgate_ptr + o_out, round_to(b_dgate, dgate_ptr.dtype.element_ty), mask=mask)
    if NEED_DUP:
        b_dup = b_dy * (b_g * b_share)
        tl.store(dup_ptr + o_out, round_to(b_dup, dup_ptr.dtype.element_ty), mask=mask)


_BLOCK = 1024  # 8 elements a thread


def rows(n_rows: int, n_cols: int) -> list[dict[str, int]]:
    """Blocks and warps: that of `_BLOCK` elements, then what `python -m foundry_kernels tune` tries beside it. Narrow
    rows share a program."""
    found = []
    for elements, warps in (
        (_BLOCK, 4),
        (_BLOCK, 8),
        (_BLOCK // 2, 4),
        (2 * _BLOCK, 4),
        (2 * _BLOCK, 8),
        (4 * _BLOCK, 8),
    ):
        cols = min(elements, triton.next_power_of_2(n_cols))
        tile = min(elements // cols, triton.next_power_of_2(n_rows))
        row = {"BLOCK_ROWS": tile, "BLOCK_COLS": cols, "num_warps": warps}
        if row not in found:
            found.append(row)
    return found


def _tiles(
    kernel: str, n_rows: int, n_cols: int, dtype: torch.dtype, activation: str, device: torch.device
) -> tuple[tuple[int], dict[str, int], int]:
    """Grid, block and tiles per row."""
    block = choose(kernel, f"{8 * dtype.itemsize}-bit {activation}", rows(n_rows, n_cols), device)
    n_tiles = triton.cdiv(n_cols, block["BLOCK_COLS"])
    grid = (triton.cdiv(n_rows, block["BLOCK_ROWS"]) * n_tiles,)
    return grid, block, n_tiles


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two halves of a packed tensor, or gate and up as they are."""
    if up is not None:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def _layout(
    shape: tuple[int, ...], out_gap: int, *strides: tuple[int, ...]
) -> tuple[int, int, int, int, int, list[int]] | None:
    """(rank, n_rows, n_cols, n1, n2, strides) of tensors of this shape; None where they must be copied first.

    Rows that are contiguous in every tensor and, with an `out_gap` of 0, in the output are one long row.
    """
    layout = row_strides(shape, *strides)
    if layout is None:
        return None
    rank, n1, n2, rows = layout
    n_cols = shape[-1]
    n_rows = math.prod(shape[:-1])
    if rank == 1 and out_gap == 0 and (n_rows == 1 or all(row_stride == n_cols for *_, row_stride in rows)):
        n_rows, n_cols = 1, n_rows * n_cols
    return rank, n_rows, n_cols, n1, n2, [s for row in rows for s in row]


def _empty_fwd(gate: Tensor, up: Tensor | None) -> Tensor:
    if up is not None:
        return empty_like(gate)
    return torch.empty((*gate.shape[:-1], gate.shape[-1] // 2), dtype=gate.dtype, device=gate.device)


@planned
def _plan_fwd(
    shape: tuple[int, ...],
    gate_strides: tuple[int, ...],
    up_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    activation: str,
) -> Plan | None:
    layout = _layout(shape, 0, gate_strides, up_strides)
    if layout is None:
        return None
    rank, n_rows, n_cols, n1, n2, strides = layout
    grid, block, n_tiles = _tiles("glu_fwd_kernel", n_rows, n_cols, dtype, activation, device)
    constants = {"RANK": rank, "ACTIVATION": activation, "COMPUTE": compute_dtype(dtype)}
    return Plan(grid, (n_rows, n_cols, n_tiles, n1, n2, *strides), constants | block)


def _fwd(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    y = _empty_fwd(gate, up)
    if y.numel() == 0:
        return y
    gate, up = _halves(gate, up)
    plan = _plan_fwd(y.shape, gate.stride(), up.stride(), gate.dtype, gate.device, activation)
    if plan is None:
        gate, up = gate.contiguous(), up.contiguous()
        plan = _plan_fwd(y.shape, gate.stride(), up.stride(), gate.dtype, gate.device, activation)
        assert plan is not None
    launch(glu_fwd_kernel, plan, gate, up, y)
    return y


def _empty_bwd(
    gate: Tensor, up: Tensor | None, need_dgate: bool, need_dup: bool
) -> tuple[Tensor | None, Tensor | None]:
    return empty_like(gate) if need_dgate else None, None if up is None or not need_dup else empty_like(up)


@planned
def _plan_bwd(
    shape: tuple[int, ...],
    dy_strides: tuple[int, ...],
    gate_strides: tuple[int, ...],
    up_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    packed: bool,
    activation: str,
    need_dgate: bool,
    need_dup: bool,
) -> Plan | None:
    out_gap = shape[-1] if packed else 0
    layout = _layout(shape, out_gap, dy_strides, gate_strides, up_strides)
    if layout is None:
        return None
    rank, n_rows, n_cols, n1, n2, strides = layout
    grid, block, n_tiles = _tiles("glu_bwd_kernel", n_rows, n_cols, dtype, activation, device)
    constants = {"RANK": rank, "ACTIVATION": activation, "COMPUTE": compute_dtype(dtype)}
    needed = {"NEED_DGATE": need_dgate, "NEED_DUP": need_dup}
    numbers = (shape[-1] + out_gap, n_rows, n_cols, n_tiles, n1, n2, *strides)
    return Plan(grid, numbers, constants | needed | block)


def _bwd(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, need_dgate: bool, need_dup: bool
) -> tuple[Tensor | None, Tensor | None]:
    dgate, dup = _empty_bwd(gate, up, need_dgate, need_dup)
    if dy.numel() == 0 or (dgate is None and dup is None):
        return dgate, dup
    packed = up is None
    into_gate, into_up = _halves(dgate, None) if packed and dgate is not None else (dgate, dup)
    gate, up = _halves(gate, up)
    options = gate.dtype, gate.device, packed, activation, into_gate is not None, into_up is not None
    plan = _plan_bwd(dy.shape, dy.stride(), gate.stride(), up.stride(), *options)
    if plan is None:
        dy, gate, up = dy.contiguous(), gate.contiguous(), up.contiguous()
        plan = _plan_bwd(dy.shape, dy.stride(), gate.stride(), up.stride(), *options)
        assert plan is not None
    launch(glu_bwd_kernel, plan, dy, gate, up, into_gate, into_up)
    return dgate, dup


def _fwd_fake(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    return _empty_fwd(gate, up)


def _bwd_fake(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, need_dgate: bool, need_dup: bool
) -> tuple[Tensor | None, Tensor | None]:
    return _empty_bwd(gate, up, need_dgate, need_dup)


_glu_fwd = define("triton_glu_fwd(Tensor gate, Tensor? up, str activation) -> Tensor", _fwd, _fwd_fake)
_glu_bwd = define(
    "triton_glu_bwd(Tensor dy, Tensor gate, Tensor? up, str activation, bool need_dgate, bool need_dup) "
    "-> (Tensor dgate, Tensor dup)",
    _bwd,
    _bwd_fake,
)


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _glu_fwd(gate, up, activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_derivative("swiglu" if ctx.activation == "silu" else "geglu")
        gate, up = ctx.saved_tensors
        need_dgate, need_dup, _ = ctx.needs_input_grad
        dgate, dup = _glu_bwd(dy, gate, up, ctx.activation, need_dgate, need_dup)
        return dgate if need_dgate else None, dup if need_dup else None, None


def _glu(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    if torch.is_grad_enabled() and (gate.requires_grad or (up is not None and up.requires_grad)):
        return _GLU.apply(gate, up, activation)
    return _glu_fwd(gate, up, activation)


def swiglu(gate: Tensor, up: Tensor | None) -> Tensor:
    return _glu(gate, up, "silu")


def geglu(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    return _glu(gate, up, "gelu" if approximate == "none" else "gelu_tanh")
