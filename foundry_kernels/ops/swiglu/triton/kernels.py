"""The kernels of gated linear units.

One forward and one backward kernel compute all activations. A program takes a block of at most 1024 elements of some
rows; contiguous tensors are one long row. The halves of a packed tensor and of its gradient are views. In an
interleaved tensor, whole rows are read and written, so that accesses are wide, and gate and up are separated in
registers.

The options of swiglu (ALPHA, LIMIT, UP_OFFSET, INTERLEAVED) are constants of the kernels: a model has one value of
each, and they cost nothing if they are off. With DROPOUT (`core.dropout`) the rows of contiguous tensors are not
joined, because the mask depends on the row's number.

Names: `row_offset` finds a row of gate by n1, n2 and stride_gate0, stride_gate1, stride_gate2; b_ is a block of values,
o_ offsets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.activations import activated, derivative, gate_factor, times_slope
from foundry_kernels._triton.functions import dropout_factors, round_to, row_offset


@triton.jit
def _block(n_rows, n_cols, n_tiles, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """This program's rows [R], columns [1, C] and mask [R, C]. The tiles of a row follow each other."""
    program = tl.program_id(0)
    rows = (program // n_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = ((program % n_tiles).to(tl.int64) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    return rows, cols, (rows < n_rows)[:, None] & (cols < n_cols)


@triton.jit
def _pair_block(rows, n_rows, n_cols, n_tiles, BLOCK_COLS: tl.constexpr):
    """The columns [1, 2C] and mask [R, 2C] of `_block`, in interleaved rows."""
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
def _dropped(b_x, seed_ptr, rows, n_tiles, threshold, scale, DROPOUT: tl.constexpr, BLOCK_ROWS: tl.constexpr,
             BLOCK_COLS: tl.constexpr):  # fmt: skip
    """Dropout of this program's block [R, C]."""
    if DROPOUT:
        start = (tl.program_id(0) % n_tiles) * BLOCK_COLS
        shape: tl.constexpr = [BLOCK_ROWS, BLOCK_COLS]
        b_x = b_x * dropout_factors(seed_ptr, rows[:, None], start, threshold, scale, shape, BLOCK_COLS)
    return b_x


@triton.jit
def _clamped_gate(b_g, LIMIT: tl.constexpr):
    """NaN stays."""
    if LIMIT is not None:
        b_g = tl.where(b_g > LIMIT, LIMIT, b_g)
    return b_g


@triton.jit
def _shifted_up(b_u, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    """Clamped up + UP_OFFSET; NaN stays."""
    if LIMIT is not None:
        b_u = tl.where(b_u > LIMIT, LIMIT, tl.where(b_u < -LIMIT, -LIMIT, b_u))
    if UP_OFFSET != 0.0:
        b_u = b_u + UP_OFFSET
    return b_u


@triton.jit
def _scaled(b_g, ALPHA: tl.constexpr):
    """The argument of the logistic function."""
    if ALPHA != 1.0:
        b_g = b_g * ALPHA
    return b_g


@triton.jit
def glu_fwd_kernel(
    gate_ptr, up_ptr, y_ptr, seed_ptr,
    n_rows, n_cols, n_tiles, n1, n2, stride_gate0, stride_gate1, stride_gate2, stride_up0, stride_up1, stride_up2,
    threshold, scale,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, DROPOUT: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Writes y. With INTERLEAVED, `gate_ptr` is the packed tensor and `up_ptr` is None."""
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
    b_y = activated(b_g, gate_factor(_scaled(b_g, ALPHA), ACTIVATION), ACTIVATION) * _shifted_up(b_u, LIMIT, UP_OFFSET)
    b_y = _dropped(b_y, seed_ptr, rows, n_tiles, threshold, scale, DROPOUT, BLOCK_ROWS, BLOCK_COLS)
    tl.store(y_ptr + (rows * n_cols)[:, None] + cols, round_to(b_y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _slope(b_g, b_factor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr):
    if ALPHA == 1.0:
        b_slope = derivative(b_g, b_factor, ACTIVATION)
    else:  # in this order, ALPHA causes no overflow
        b_slope = b_factor + b_g * (b_factor * (1.0 - b_factor)) * ALPHA
    return b_slope


@triton.jit
def _into_gate(b_dy, b_x, b_u, b_g, b_factor, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
               UP_OFFSET: tl.constexpr):  # fmt: skip
    """The gradient of gate. b_x is gate, and b_g is gate after the clamp."""
    b_dgate = times_slope(
        b_dy * _shifted_up(b_u, LIMIT, UP_OFFSET), _slope(b_g, b_factor, ACTIVATION, ALPHA), ACTIVATION
    )
    if LIMIT is not None:
        b_dgate = tl.where(b_x <= LIMIT, b_dgate, 0.0)
    return b_dgate


@triton.jit
def _into_up(b_dy, b_u, b_g, b_factor, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr):
    b_dup = b_dy * activated(b_g, b_factor, ACTIVATION)
    if LIMIT is not None:
        b_dup = tl.where(tl.abs(b_u) <= LIMIT, b_dup, 0.0)
    return b_dup


@triton.jit
def glu_bwd_kernel(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, seed_ptr, out_stride,
    n_rows, n_cols, n_tiles, n1, n2, stride_dy0, stride_dy1, stride_dy2, stride_gate0, stride_gate1, stride_gate2,
    stride_up0, stride_up1, stride_up2, threshold, scale,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, DROPOUT: tl.constexpr, NEED_DGATE: tl.constexpr, NEED_DUP: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """`out_stride` is the row stride of dgate and of dup. With INTERLEAVED, `gate_ptr` and `dgate_ptr` are packed
    tensors, and `up_ptr` and `dup_ptr` are None."""
    rows, cols, mask = _block(n_rows, n_cols, n_tiles, BLOCK_ROWS, BLOCK_COLS)
    o_dy = row_offset(rows, n1, n2, stride_dy0, stride_dy1, stride_dy2, RANK)[:, None] + cols
    o_gate = row_offset(rows, n1, n2, stride_gate0, stride_gate1, stride_gate2, RANK)[:, None]
    o_out = (rows * out_stride)[:, None]
    if not INTERLEAVED:
        o_gate += cols
        o_out += cols
    b_dy = tl.load(dy_ptr + o_dy, mask=mask, other=0.0).to(COMPUTE)
    b_dy = _dropped(b_dy, seed_ptr, rows, n_tiles, threshold, scale, DROPOUT, BLOCK_ROWS, BLOCK_COLS)
    if INTERLEAVED:
        b_x, b_u = _load_pairs(gate_ptr, o_gate, rows, n_rows, n_cols, n_tiles, COMPUTE, BLOCK_COLS)
    else:
        b_x = tl.load(gate_ptr + o_gate, mask=mask, other=0.0).to(COMPUTE)
    b_g = _clamped_gate(b_x, LIMIT)
    b_factor = gate_factor(_scaled(b_g, ALPHA), ACTIVATION)
    if INTERLEAVED:
        b_dgate = _into_gate(b_dy, b_x, b_u, b_g, b_factor, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
        b_out = tl.join(b_dgate, _into_up(b_dy, b_u, b_g, b_factor, ACTIVATION, LIMIT))
        b_out = tl.reshape(b_out, [b_dy.shape[0], 2 * BLOCK_COLS])
        pair_cols, pair_mask = _pair_block(rows, n_rows, n_cols, n_tiles, BLOCK_COLS)
        tl.store(dgate_ptr + o_out + pair_cols, round_to(b_out, dgate_ptr.dtype.element_ty), mask=pair_mask)
    else:
        if NEED_DGATE or LIMIT is not None:
            o_up = row_offset(rows, n1, n2, stride_up0, stride_up1, stride_up2, RANK)[:, None] + cols
            b_u = tl.load(up_ptr + o_up, mask=mask, other=0.0).to(COMPUTE)
        else:
            b_u = b_g  # a placeholder: dup does not depend on it
        if NEED_DGATE:
            b_dgate = _into_gate(b_dy, b_x, b_u, b_g, b_factor, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
            tl.store(dgate_ptr + o_out, round_to(b_dgate, dgate_ptr.dtype.element_ty), mask=mask)
        if NEED_DUP:
            b_dup = _into_up(b_dy, b_u, b_g, b_factor, ACTIVATION, LIMIT)
            tl.store(dup_ptr + o_out, round_to(b_dup, dup_ptr.dtype.element_ty), mask=mask)
