"""The kernels of RMSNorm and, with CENTERED, of LayerNorm.

Forward: a program keeps `BLOCK_ROWS` whole rows in registers, so x is read once. A row that does not fit is read twice
by one program (three times for LayerNorm). Backward: a persistent grid. Each program sums its part of dW and of the
bias's gradient in float32, in registers or, for wide rows, in its own row of the partial buffer. One more kernel sums
the partials and rounds. There are no atomics, so gradients are bitwise deterministic on one device.

LayerNorm computes the variance around the rounded mean and corrects it by the mean of the differences (`rest`), so that
a large mean costs no digits.

With DROPOUT, dropout is applied to x before the residual is added (`core.dropout`). Then dx is the gradient of x, and
dres that of the residual.

Names: `row_offset` finds a row of x by n1, n2 and stride_x0, stride_x1, stride_x2; b_ is a block of values, m_ a mask,
o_ offsets.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import dropout_factors, normalized, reciprocal_rms, round_to, row_offset


@triton.jit
def _residual_sum(b_x, b_r, dtype: tl.constexpr, COMPUTE: tl.constexpr):
    return round_to(b_x + b_r, dtype).to(COMPUTE)


@triton.jit
def _scaled(b_h, rstd, w_ptr, bias_ptr, o_cols, m_cols, offset, x_dtype: tl.constexpr, y_dtype: tl.constexpr,
            HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND_FIRST: tl.constexpr,
            COMPUTE: tl.constexpr):  # fmt: skip
    """y for a block of h: [R, C] values, [R, 1] rstd, [1, C] columns."""
    b_y = normalized(b_h, rstd, x_dtype, ROUND_FIRST, COMPUTE)
    if HAS_WEIGHT:
        b_y = b_y * (tl.load(w_ptr + o_cols, mask=m_cols, other=0.0).to(COMPUTE) + offset)
    if HAS_BIAS:
        b_y = b_y + tl.load(bias_ptr + o_cols, mask=m_cols, other=0.0).to(COMPUTE)
    return round_to(b_y, y_dtype)


@triton.jit
def _sum_around_mean(sum_of_squares, rest, n_cols):
    """The sum of squares around the mean, from the sum of squares around a number that differs from the mean by
    `rest`."""
    return tl.maximum(sum_of_squares - rest * rest * n_cols, 0.0)


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr, r_ptr, w_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr, seed_ptr,
    n_rows, n_cols, n1, n2, stride_x0, stride_x1, stride_x2, stride_r0, stride_r1, stride_r2, eps, offset,
    threshold, scale,
    RANK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr, ROUND_FIRST: tl.constexpr, SAVE_STATS: tl.constexpr, DROPOUT: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Rows that fit in registers: BLOCK_ROWS of them per program, BLOCK_COLS >= n_cols."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
    cols = tl.arange(0, BLOCK_COLS)[None, :]  # [1, C]
    m_rows = (rows < n_rows)[:, None]
    m_cols = cols < n_cols
    mask = m_rows & m_cols
    o_x = row_offset(rows, n1, n2, stride_x0, stride_x1, stride_x2, RANK)[:, None] + cols
    o_y = (rows * n_cols)[:, None] + cols
    b_h = tl.load(x_ptr + o_x, mask=mask, other=0.0).to(COMPUTE)  # [R, C]
    if HAS_RESIDUAL:
        o_r = row_offset(rows, n1, n2, stride_r0, stride_r1, stride_r2, RANK)[:, None] + cols
        b_r = tl.load(r_ptr + o_r, mask=mask, other=0.0).to(COMPUTE)
        if DROPOUT:
            b_h *= dropout_factors(seed_ptr, rows[:, None], 0, threshold, scale, [BLOCK_ROWS, BLOCK_COLS], BLOCK_COLS)
        b_h = _residual_sum(b_h, b_r, x_ptr.dtype.element_ty, COMPUTE)
        tl.store(h_ptr + o_y, round_to(b_h, h_ptr.dtype.element_ty), mask=mask)
    if CENTERED:
        mean = tl.sum(b_h, 1) / n_cols  # [R]
        b_h = tl.where(mask, b_h - mean[:, None], 0.0)
        rest = tl.sum(b_h, 1) / n_cols
        total = _sum_around_mean(tl.sum(b_h * b_h, 1), rest, n_cols)
        b_h -= rest[:, None]
        if SAVE_STATS:
            tl.store(mean_ptr + rows, mean + rest, mask=rows < n_rows)
    else:
        total = tl.sum(b_h * b_h, 1)
    rstd = reciprocal_rms(total, n_cols, eps)  # [R]
    if SAVE_STATS:
        tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    b_y = _scaled(b_h, rstd[:, None], w_ptr, bias_ptr, cols, m_cols, offset, x_ptr.dtype.element_ty,
                  y_ptr.dtype.element_ty, HAS_WEIGHT, HAS_BIAS, ROUND_FIRST, COMPUTE)  # fmt: skip
    tl.store(y_ptr + o_y, b_y, mask=mask)


@triton.jit
def _block_of_h(x_ptr, o_x, r_ptr, o_r, seed_ptr, row, start, cols, mask, threshold, scale,
                HAS_RESIDUAL: tl.constexpr, DROPOUT: tl.constexpr, COMPUTE: tl.constexpr,
                BLOCK_COLS: tl.constexpr):  # fmt: skip
    """The input of the norm, x or x + residual, for the row at these offsets from column `start` on."""
    b_h = tl.load(x_ptr + o_x + cols, mask=mask, other=0.0).to(COMPUTE)
    if HAS_RESIDUAL:
        b_r = tl.load(r_ptr + o_r + cols, mask=mask, other=0.0).to(COMPUTE)
        if DROPOUT:
            b_h *= dropout_factors(seed_ptr, row, start, threshold, scale, [1, BLOCK_COLS], BLOCK_COLS)
        b_h = _residual_sum(b_h, b_r, x_ptr.dtype.element_ty, COMPUTE)
    return b_h


@triton.jit
def rms_norm_fwd_wide_kernel(
    x_ptr, r_ptr, w_ptr, bias_ptr, y_ptr, h_ptr, mean_ptr, rstd_ptr, seed_ptr,
    n_rows, n_cols, n1, n2, stride_x0, stride_x1, stride_x2, stride_r0, stride_r1, stride_r2, eps, offset,
    threshold, scale,
    RANK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
    CENTERED: tl.constexpr, ROUND_FIRST: tl.constexpr, SAVE_STATS: tl.constexpr, DROPOUT: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """One program per row, which it reads twice (centered: three times). It computes x + residual each time: reading h
    instead would need the writes of other threads."""
    row = tl.program_id(0).to(tl.int64)
    o_x = row_offset(row, n1, n2, stride_x0, stride_x1, stride_x2, RANK)
    o_r = row_offset(row, n1, n2, stride_r0, stride_r1, stride_r2, RANK)
    b_sum = tl.zeros([1, BLOCK_COLS], COMPUTE)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)[None, :]
        b_h = _block_of_h(x_ptr, o_x, r_ptr, o_r, seed_ptr, row, start, cols, cols < n_cols, threshold, scale,
                          HAS_RESIDUAL, DROPOUT, COMPUTE, BLOCK_COLS)  # fmt: skip
        b_sum += b_h if CENTERED else b_h * b_h
    total = tl.sum(b_sum, 1)  # [1]
    if CENTERED:
        mean = total / n_cols
        b_sum = tl.zeros([1, BLOCK_COLS], COMPUTE)
        b_squares = tl.zeros([1, BLOCK_COLS], COMPUTE)
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)[None, :]
            mask = cols < n_cols
            b_h = _block_of_h(x_ptr, o_x, r_ptr, o_r, seed_ptr, row, start, cols, mask, threshold, scale,
                              HAS_RESIDUAL, DROPOUT, COMPUTE, BLOCK_COLS)  # fmt: skip
            b_h = tl.where(mask, b_h - mean[:, None], 0.0)
            b_sum += b_h
            b_squares += b_h * b_h
        rest = tl.sum(b_sum, 1) / n_cols
        total = _sum_around_mean(tl.sum(b_squares, 1), rest, n_cols)
        if SAVE_STATS:
            tl.store(mean_ptr + row + tl.arange(0, 1), mean + rest)
    rstd = reciprocal_rms(total, n_cols, eps)
    if SAVE_STATS:
        tl.store(rstd_ptr + row + tl.arange(0, 1), rstd)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)[None, :]
        mask = cols < n_cols
        b_h = _block_of_h(x_ptr, o_x, r_ptr, o_r, seed_ptr, row, start, cols, mask, threshold, scale,
                          HAS_RESIDUAL, DROPOUT, COMPUTE, BLOCK_COLS)  # fmt: skip
        if HAS_RESIDUAL:
            tl.store(h_ptr + row * n_cols + cols, round_to(b_h, h_ptr.dtype.element_ty), mask=mask)
        if CENTERED:
            b_h = b_h - mean[:, None] - rest[:, None]
        b_y = _scaled(b_h, rstd[:, None], w_ptr, bias_ptr, cols, mask, offset, x_ptr.dtype.element_ty,
                      y_ptr.dtype.element_ty, HAS_WEIGHT, HAS_BIAS, ROUND_FIRST, COMPUTE)  # fmt: skip
        tl.store(y_ptr + row * n_cols + cols, b_y, mask=mask)


@triton.jit
def rms_norm_bwd_kernel(
    dy_ptr, dh_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, dres_ptr, seed_ptr,
    n_rows, n_cols, n1, n2, stride_dy0, stride_dy1, stride_dy2, stride_dh0, stride_dh1, stride_dh2,
    stride_x0, stride_x1, stride_x2, offset, threshold, scale,
    RANK: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, CENTERED: tl.constexpr,
    ROUND_FIRST: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    DROPOUT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rows that fit in registers. Program p takes tiles p, p + programs, ...; dw_ptr and db_ptr are [programs, n_cols].
    With STAGES > 1, the next tiles are loaded to shared memory during the computation of one."""
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    m_cols = cols < n_cols
    if HAS_WEIGHT:
        b_w = tl.load(w_ptr + cols, mask=m_cols, other=0.0).to(COMPUTE) + offset  # [1, C]
    b_dw = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
    b_db = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
    program = tl.program_id(0).to(tl.int64)
    for tile in tl.range(program, tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0), num_stages=STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)  # [R]
        mask = (rows < n_rows)[:, None] & m_cols
        o_x = row_offset(rows, n1, n2, stride_x0, stride_x1, stride_x2, RANK)[:, None] + cols
        o_dy = row_offset(rows, n1, n2, stride_dy0, stride_dy1, stride_dy2, RANK)[:, None] + cols
        b_x = tl.load(x_ptr + o_x, mask=mask, other=0.0).to(COMPUTE)  # [R, C]
        b_dy = tl.load(dy_ptr + o_dy, mask=mask, other=0.0).to(COMPUTE)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        if CENTERED:  # past the row's end, x is no longer 0, but dy is
            b_x -= tl.load(mean_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        if NEED_DW:
            b_dw += b_dy * normalized(b_x, rstd, x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
        if NEED_DB:
            b_db += b_dy
        if NEED_DX:
            b_v = b_dy * b_w if HAS_WEIGHT else b_dy
            b_n = b_x * rstd
            mean_vn = tl.sum(b_v * b_n, 1)[:, None] / n_cols
            if CENTERED:
                b_v -= tl.sum(b_v, 1)[:, None] / n_cols
            b_dx = rstd * (b_v - b_n * mean_vn)
            if HAS_DH:
                o_dh = row_offset(rows, n1, n2, stride_dh0, stride_dh1, stride_dh2, RANK)[:, None] + cols
                b_dx += tl.load(dh_ptr + o_dh, mask=mask, other=0.0).to(COMPUTE)
            o_dx = (rows * n_cols)[:, None] + cols
            if DROPOUT:
                tl.store(dres_ptr + o_dx, round_to(b_dx, dres_ptr.dtype.element_ty), mask=mask)
                shape: tl.constexpr = [BLOCK_ROWS, BLOCK_COLS]
                b_dx *= dropout_factors(seed_ptr, rows[:, None], 0, threshold, scale, shape, BLOCK_COLS)
            tl.store(dx_ptr + o_dx, round_to(b_dx, dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        o_dw = program * n_cols + cols
        tl.store(dw_ptr + o_dw, tl.sum(b_dw, 0)[None, :], mask=m_cols)
    if NEED_DB:
        tl.store(db_ptr + program * n_cols + cols, tl.sum(b_db, 0)[None, :], mask=m_cols)


@triton.jit
def rms_norm_bwd_wide_kernel(
    dy_ptr, dh_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, dw_ptr, db_ptr, dres_ptr, seed_ptr,
    n_rows, n_cols, n1, n2, stride_dy0, stride_dy1, stride_dy2, stride_dh0, stride_dh1, stride_dh2,
    stride_x0, stride_x1, stride_x2, offset, threshold, scale,
    RANK: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, CENTERED: tl.constexpr,
    ROUND_FIRST: tl.constexpr, NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, NEED_DB: tl.constexpr,
    DROPOUT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Rows read in blocks of columns. dw_ptr and db_ptr [programs, n_cols] start at zero. A program adds to its own row
    of them, and each thread to its own elements."""
    program = tl.program_id(0).to(tl.int64)
    for row in range(program, n_rows, tl.num_programs(0)):
        o_x = row_offset(row, n1, n2, stride_x0, stride_x1, stride_x2, RANK)
        o_dy = row_offset(row, n1, n2, stride_dy0, stride_dy1, stride_dy2, RANK)
        o_dh = row_offset(row, n1, n2, stride_dh0, stride_dh1, stride_dh2, RANK)
        rstd = tl.load(rstd_ptr + row)
        center = tl.load(mean_ptr + row) if CENTERED else 0.0
        b_sum = tl.zeros([BLOCK_COLS], COMPUTE)
        b_grads = tl.zeros([BLOCK_COLS], COMPUTE)
        if NEED_DX:
            for start in range(0, n_cols, BLOCK_COLS):
                cols = start + tl.arange(0, BLOCK_COLS)
                mask = cols < n_cols
                b_v = tl.load(dy_ptr + o_dy + cols, mask=mask, other=0.0).to(COMPUTE)
                if HAS_WEIGHT:
                    b_v *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(COMPUTE) + offset
                b_x = tl.load(x_ptr + o_x + cols, mask=mask, other=0.0).to(COMPUTE)
                if CENTERED:
                    b_x -= center
                    b_grads += b_v
                b_sum += b_v * (b_x * rstd)
        mean = tl.sum(b_sum, 0) / n_cols
        if CENTERED:
            mean_grad = tl.sum(b_grads, 0) / n_cols
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = cols < n_cols
            b_x = tl.load(x_ptr + o_x + cols, mask=mask, other=0.0).to(COMPUTE)
            b_dy = tl.load(dy_ptr + o_dy + cols, mask=mask, other=0.0).to(COMPUTE)
            if CENTERED:
                b_x -= center
            if NEED_DB:
                p_db = db_ptr + program * n_cols + cols
                tl.store(p_db, tl.load(p_db, mask=mask, other=0.0) + b_dy, mask=mask)
            if NEED_DW:
                p_dw = dw_ptr + program * n_cols + cols
                b_dw = b_dy * normalized(b_x, rstd, x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
                tl.store(p_dw, tl.load(p_dw, mask=mask, other=0.0) + b_dw, mask=mask)
            if NEED_DX:
                if HAS_WEIGHT:
                    b_dy *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(COMPUTE) + offset
                if CENTERED:
                    b_dy -= mean_grad
                b_dx = rstd * (b_dy - b_x * rstd * mean)
                if HAS_DH:
                    b_dx += tl.load(dh_ptr + o_dh + cols, mask=mask, other=0.0).to(COMPUTE)
                if DROPOUT:
                    tl.store(dres_ptr + row * n_cols + cols, round_to(b_dx, dres_ptr.dtype.element_ty), mask=mask)
                    b_dx *= dropout_factors(seed_ptr, row, start, threshold, scale, [BLOCK_COLS], BLOCK_COLS)
                tl.store(dx_ptr + row * n_cols + cols, round_to(b_dx, dx_ptr.dtype.element_ty), mask=mask)
