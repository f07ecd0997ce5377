"""SwiGLU and GEGLU in Triton.

One kernel forward and one backward compute the three activations. A program takes a block of at most 1024 elements of
some rows; contiguous tensors are one long row. The halves of a packed tensor are views of it, and so are those of its
gradient, which is thereby written packed. Of an interleaved one whole rows are read and written, so that accesses are
wide; gate and up are separated in registers.

The options of swiglu (ALPHA, LIMIT, UP_OFFSET, INTERLEAVED) are constants of the kernels: a model has one value of
each, and a kernel without them has no trace of them.

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

from foundry_kernels._triton.activations import derivative, gate_factor
from foundry_kernels._triton.functions import round_to, row_offset
from foundry_kernels._triton.launch import Plan, launch, planned
from foundry_kernels._triton.operators import define, refuse_second_derivative, requires_grad
from foundry_kernels._triton.rows import compute_dtype, contiguous, empty_like, row_strides, strides_of
from foundry_kernels._triton.tuning import choose
from foundry_kernels.ops.swiglu.options import GatedOptions


@triton.jit
def _block(n_rows, n_cols, n_tiles, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """This program's rows [R], columns [1, C] and mask [R, C]. The tiles of a row follow each other."""
    program = tl.program_id(0)
    rows = (program // n_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = ((program % n_tiles).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    return rows, cols, (rows < n_rows)[:, None] & (cols < n_cols)


@triton.jit
def _pair_block(rows, n_rows, n_cols, n_tiles, BLOCK_COLS: tl.constexpr):
    """The columns [1, 2C] and mask [R, 2C] in interleaved rows of what `_block` gives."""
    first = (tl.program_id(0) % n_tiles).to(tl.int64) * (2 * BLOCK_COLS)
    cols = (first + tl.arange(0, 2 * BLOCK_COLS))[None, :]
    return cols, (rows < n_rows)[:, None] & (cols < 2 * n_cols)


@triton.jit
def _load_pairs(ptr, o_rows, rows, n_rows, n_cols, n_tiles, COMPUTE: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """Gate and up [R, C] of interleaved rows."""
    cols, mask = _pair_block(rows, n_rows, n_cols, n_tiles, BLOCK_COLS)
    b_x = tl.load(ptr + o_rows + cols, mask=mask, other=0.0).to(COMPUTE)
    return tl.split(tl.reshape(b_x, [b_x.shape[0], BLOCK_COLS, 2]))


@triton.jit
def _clamped_gate(b_g, LIMIT: tl.constexpr):
    """NaN stays."""
    if LIMIT is not None:
        b_g = tl.where(b_g > LIMIT, LIMIT, b_g)
    return b_g


@triton.jit
def _shifted_up(b_u, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    """Clamped first; NaN stays."""
    if LIMIT is not None:
        b_u = tl.where(b_u > LIMIT, LIMIT, tl.where(b_u < -LIMIT, -LIMIT, b_u))
    if UP_OFFSET != 0.0:
        b_u = b_u + UP_OFFSET
    return b_u


@triton.jit
def _scaled(b_g, ALPHA: tl.constexpr):
    """What the logistic function is taken of."""
    if ALPHA != 1.0:
        b_g = b_g * ALPHA
    return b_g


@triton.jit
def glu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr,
    n_rows, n_cols, n_tiles, n1, n2, stride_gate0, stride_gate1, stride_gate2, stride_up0, stride_up1, stride_up2,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Writes y. With INTERLEAVED `gate_ptr` is the packed tensor, and there is no `up_ptr`."""
    rows, cols, mask = _block(n_rows, n_cols, n_tiles, BLOCK_ROWS, BLOCK_COLS)
    if INTERLEAVED:
        o_rows = row_offset(rows, n1, n2, stride_gate0, stride_gate1, stride_gate2, RANK)[:, None]
        b_g, b_u = _load_pairs(gate_ptr, o_rows, rows, n_rows, n_cols, n_tiles, COMPUTE, BLOCK_COLS)
    else:
        o_gate = row_offset(rows, n1, n2, stride_gate0, stride_gate1, stride_gate2, RANK)[:, None] + cols
        o_up = row_offset(rows, n1, n2, stride_up0, stride_up1, stride_up2, RANK)[:, None] + cols
        b_g = tl.load(gate_ptr + o_gate, mask=mask, other=0.0).to(COMPUTE)
        b_u = tl.load(up_ptr + o_up, mask=mask, other=0.0).to(COMPUTE)
    b_g = _clamped_gate(b_g, LIMIT)
    b_y = b_g * gate_factor(_scaled(b_g, ALPHA), ACTIVATION) * _shifted_up(b_u, LIMIT, UP_OFFSET)
    tl.store(y_ptr + (rows * n_cols)[:, None] + cols, round_to(b_y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _slope(b_g, b_factor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    if ALPHA == 1.0:
        b_slope = derivative(b_g, b_factor, ACTIVATION)
    else:  # in an order in which ALPHA makes nothing infinite
        b_slope = b_factor + b_g * (b_factor * (1.0 - b_factor)) * ALPHA
    return b_slope


@triton.jit
def _into_gate(b_dy, b_x, b_u, b_g, b_factor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
               UP_OFFSET: tl.constexpr):  # fmt: skip
    """The gradient of gate b_x, which clamped is b_g."""
    b_dgate = b_dy * _shifted_up(b_u, LIMIT, UP_OFFSET) * _slope(b_g, b_factor, ACTIVATION, ALPHA)
    if LIMIT is not None:
        b_dgate = tl.where(b_x <= LIMIT, b_dgate, 0.0)
    return b_dgate


@triton.jit
def _into_up(b_dy, b_u, b_g, b_factor, LIMIT: tl.constexpr):
    b_dup = b_dy * (b_g * b_factor)
    if LIMIT is not None:
        b_dup = tl.where(tl.abs(b_u) <= LIMIT, b_dup, 0.0)
    return b_dup


@triton.jit
def glu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, out_stride,
    n_rows, n_cols, n_tiles, n1, n2, stride_dy0, stride_dy1, stride_dy2, stride_gate0, stride_gate1, stride_gate2,
    stride_up0, stride_up1, stride_up2,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, NEED_DGATE: tl.constexpr, NEED_DUP: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """`out_stride` is the distance between rows of dgate, and of dup. With INTERLEAVED `gate_ptr` and `dgate_ptr` are
    packed tensors, and there are no `up_ptr` and `dup_ptr`."""
    rows, cols, mask = _block(n_rows, n_cols, n_tiles, BLOCK_ROWS, BLOCK_COLS)
    o_dy = row_offset(rows, n1, n2, stride_dy0, stride_dy1, stride_dy2, RANK)[:, None] + cols
    o_gate = row_offset(rows, n1, n2, stride_gate0, stride_gate1, stride_gate2, RANK)[:, None]
    o_out = (rows * out_stride)[:, None]
    if not INTERLEAVED:
        o_gate += cols
        o_out += cols
    b_dy = tl.load(dy_ptr + o_dy, mask=mask, other=0.0).to(COMPUTE)
    if INTERLEAVED:
        b_x, b_u = _load_pairs(gate_ptr, o_gate, rows, n_rows, n_cols, n_tiles, COMPUTE, BLOCK_COLS)
    else:
        b_x = tl.load(gate_ptr + o_gate, mask=mask, other=0.0).to(COMPUTE)
    b_g = _clamped_gate(b_x, LIMIT)
    b_factor = gate_factor(_scaled(b_g, ALPHA), ACTIVATION)
    if INTERLEAVED:
        b_dgate = _into_gate(b_dy, b_x, b_u, b_g, b_factor, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
        b_out = tl.join(b_dgate, _into_up(b_dy, b_u, b_g, b_factor, LIMIT))
        b_out = tl.reshape(b_out, [b_dy.shape[0], 2 * BLOCK_COLS])
        pair_cols, pair_mask = _pair_block(rows, n_rows, n_cols, n_tiles, BLOCK_COLS)
        tl.store(dgate_ptr + o_out + pair_cols, round_to(b_out, dgate_ptr.dtype.element_ty), mask=pair_mask)
    else:
        if NEED_DGATE or LIMIT is not None:
            o_up = row_offset(rows, n1, n2, stride_up0, stride_up1, stride_up2, RANK)[:, None] + cols
            b_u = tl.load(up_ptr + o_up, mask=mask, other=0.0).to(COMPUTE)
        else:
            b_u = b_g  # in place of what has no part in dup
        if NEED_DGATE:
            b_dgate = _into_gate(b_dy, b_x, b_u, b_g, b_factor, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
            tl.store(dgate_ptr + o_out, round_to(b_dgate, dgate_ptr.dtype.element_ty), mask=mask)
        if NEED_DUP:
            b_dup = _into_up(b_dy, b_u, b_g, b_factor, LIMIT)
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


PLAIN = GatedOptions()


def _constants(options: GatedOptions) -> dict[str, Any]:
    """Returns the kernels' constants. One that is absent is always the same constant, whatever number stood for it."""
    return {
        "ALPHA": float(options.alpha),
        "LIMIT": None if options.limit is None else float(options.limit),
        "UP_OFFSET": float(options.up_offset),
        "INTERLEAVED": options.interleaved,
    }


def _halves(gate: Tensor, up: Tensor | None, interleaved: bool = False) -> tuple[Tensor, Tensor | None]:
    """The two halves of a packed tensor, or gate and up as they are; an interleaved tensor stays whole."""
    if up is not None or interleaved:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def _layout(
    shape: tuple[int, ...], out_gap: int, *strides: tuple[int, ...] | None, pairs: int = -1
) -> tuple[int, int, int, int, int, list[int]] | None:
    """(rank, n_rows, n_cols, n1, n2, strides) of tensors of this shape; None where they must be copied first.

    Rows that are contiguous in every tensor and, with an `out_gap` of 0, in the output are one long row. `pairs` is the
    number of a tensor whose rows are twice as wide; None stands for one that is not there.
    """
    layout = row_strides(shape, *strides)
    whole = strides[pairs] if pairs >= 0 else None
    if layout is None or (whole is not None and whole[-1] != 1):
        return None
    rank, n1, n2, rows = layout
    n_cols = shape[-1]
    n_rows = math.prod(shape[:-1])
    widths = [n_cols * (2 if i == pairs else 1) for i, s in enumerate(strides) if s is not None]
    steps = [row[2] for row, s in zip(rows, strides, strict=True) if s is not None]
    if rank == 1 and out_gap == 0 and (n_rows == 1 or steps == widths):
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
    up_strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
    activation: str,
    options: GatedOptions,
) -> Plan | None:
    layout = _layout(shape, 0, gate_strides, up_strides, pairs=0 if options.interleaved else -1)
    if layout is None:
        return None
    rank, n_rows, n_cols, n1, n2, strides = layout
    grid, block, n_tiles = _tiles("glu_fwd_kernel", n_rows, n_cols, dtype, activation, device)
    constants = {"RANK": rank, "ACTIVATION": activation, "COMPUTE": compute_dtype(dtype)} | _constants(options)
    return Plan(grid, (n_rows, n_cols, n_tiles, n1, n2, *strides), constants | block)


def _fwd(gate: Tensor, up: Tensor | None, activation: str, options: GatedOptions) -> Tensor:
    y = _empty_fwd(gate, up)
    if y.numel() == 0:
        return y
    gate, up = _halves(gate, up, options.interleaved)
    plan = _plan_fwd(y.shape, gate.stride(), strides_of(up), gate.dtype, gate.device, activation, options)
    if plan is None:
        gate, up = gate.contiguous(), contiguous(up)
        plan = _plan_fwd(y.shape, gate.stride(), strides_of(up), gate.dtype, gate.device, activation, options)
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
    up_strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
    packed: bool,
    activation: str,
    need_dgate: bool,
    need_dup: bool,
    options: GatedOptions,
) -> Plan | None:
    out_width = shape[-1] * (2 if packed else 1)
    out_gap = 0 if options.interleaved else out_width - shape[-1]
    layout = _layout(shape, out_gap, dy_strides, gate_strides, up_strides, pairs=1 if options.interleaved else -1)
    if layout is None:
        return None
    rank, n_rows, n_cols, n1, n2, strides = layout
    grid, block, n_tiles = _tiles("glu_bwd_kernel", n_rows, n_cols, dtype, activation, device)
    constants = {"RANK": rank, "ACTIVATION": activation, "COMPUTE": compute_dtype(dtype)} | _constants(options)
    needed = {"NEED_DGATE": need_dgate, "NEED_DUP": need_dup}
    return Plan(grid, (out_width, n_rows, n_cols, n_tiles, n1, n2, *strides), constants | needed | block)


def _bwd(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    need_dgate: bool,
    need_dup: bool,
    options: GatedOptions,
) -> tuple[Tensor | None, Tensor | None]:
    dgate, dup = _empty_bwd(gate, up, need_dgate, need_dup)
    if dy.numel() == 0 or (dgate is None and dup is None):
        return dgate, dup
    packed = up is None
    into_gate, into_up = (dgate, dup) if dgate is None or not packed else _halves(dgate, None, options.interleaved)
    gate, up = _halves(gate, up, options.interleaved)
    wanted = gate.dtype, gate.device, packed, activation, into_gate is not None, into_up is not None
    plan = _plan_bwd(dy.shape, dy.stride(), gate.stride(), strides_of(up), *wanted, options)
    if plan is None:
        dy, gate, up = dy.contiguous(), gate.contiguous(), contiguous(up)
        plan = _plan_bwd(dy.shape, dy.stride(), gate.stride(), strides_of(up), *wanted, options)
        assert plan is not None
    launch(glu_bwd_kernel, plan, dy, gate, up, into_gate, into_up)
    return dgate, dup


def _fwd_fake(gate: Tensor, up: Tensor | None, activation: str, options: GatedOptions) -> Tensor:
    return _empty_fwd(gate, up)


def _bwd_fake(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    need_dgate: bool,
    need_dup: bool,
    options: GatedOptions,
) -> tuple[Tensor | None, Tensor | None]:
    return _empty_bwd(gate, up, need_dgate, need_dup)


_glu_fwd = define(
    f"triton_glu_fwd(Tensor gate, Tensor? up, str activation, {GatedOptions.SCHEMA}) -> Tensor",
    _fwd,
    _fwd_fake,
    GatedOptions,
)
_glu_bwd = define(
    "triton_glu_bwd(Tensor dy, Tensor gate, Tensor? up, str activation, bool need_dgate, bool need_dup, "
    f"{GatedOptions.SCHEMA}) -> (Tensor dgate, Tensor dup)",
    _bwd,
    _bwd_fake,
    GatedOptions,
)


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str, options: GatedOptions) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation, ctx.options = activation, options
        return _glu_fwd(gate, up, activation, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_derivative("swiglu" if ctx.activation == "silu" else "geglu")
        gate, up = ctx.saved_tensors
        need_dgate, need_dup, *_ = ctx.needs_input_grad
        dgate, dup = _glu_bwd(dy, gate, up, ctx.activation, need_dgate, need_dup, ctx.options)
        return dgate if need_dgate else None, dup if need_dup else None, None, None


def _glu(gate: Tensor, up: Tensor | None, activation: str, options: GatedOptions) -> Tensor:
    if requires_grad(gate, up):
        return _GLU.apply(gate, up, activation, options)
    return _glu_fwd(gate, up, activation, options)


def swiglu(gate: Tensor, up: Tensor | None, *options: Any) -> Tensor:
    """`options` are those of the public function, in its order."""
    return _glu(gate, up, "silu", GatedOptions(*options) if options else PLAIN)


def geglu(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    return _glu(gate, up, "gelu" if approximate == "none" else "gelu_tanh", PLAIN)
