"""RMSNorm in Triton.

Forward: a program holds `BLOCK_ROWS` whole rows in registers, so x is read once; rows that do not fit are walked
twice by one program. Backward: a persistent grid; each program keeps its share of dW in float32 (registers, or
its own row of the partial buffer for wide rows) and one more kernel sums the partials and rounds. No atomics, so a
gradient is the same bits in every run on one device.

Names: `n1, n2, *s` are what `row_offset` needs to find a row; b_ is a block of values, m_ a mask, o_ offsets.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._triton import (
    compute_dtype,
    define,
    normalized,
    programs,
    reciprocal_rms,
    refuse_second_derivative,
    round_to,
    row_offset,
    row_strides,
    sum_partials,
)

_WIDE_BLOCK = 4096


@triton.jit
def _residual_sum(b_x, b_r, dtype: tl.constexpr, COMPUTE: tl.constexpr):
    return round_to(b_x + b_r, dtype).to(COMPUTE)


@triton.jit
def _scaled(b_h, rstd, w_ptr, o_cols, m_cols, offset, x_dtype: tl.constexpr, y_dtype: tl.constexpr,
            HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """y for a block of h: [R, C] values, [R, 1] rstd, [1, C] columns."""
    b_y = normalized(b_h, rstd, x_dtype, ROUND_FIRST, COMPUTE)
    if HAS_WEIGHT:
        b_y = b_y * (tl.load(w_ptr + o_cols, mask=m_cols, other=0.0).to(COMPUTE) + offset)
    return round_to(b_y, y_dtype)


@triton.jit
def rms_norm_fwd_kernel(
    x_ptr, r_ptr, w_ptr, y_ptr, h_ptr, rstd_ptr,
    n_rows, n_cols, n1, n2, xs0, xs1, xs2, rs0, rs1, rs2, eps, offset,
    RANK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr,
    SAVE_RSTD: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Rows that fit in registers: one program, BLOCK_ROWS rows, BLOCK_COLS >= n_cols."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
    cols = tl.arange(0, BLOCK_COLS)[None, :]  # [1, C]
    m_rows = (rows < n_rows)[:, None]
    m_cols = cols < n_cols
    mask = m_rows & m_cols
    o_x = row_offset(rows, n1, n2, xs0, xs1, xs2, RANK)[:, None] + cols
    o_y = (rows * n_cols)[:, None] + cols
    b_h = tl.load(x_ptr + o_x, mask=mask, other=0.0).to(COMPUTE)  # [R, C]
    if HAS_RESIDUAL:
        o_r = row_offset(rows, n1, n2, rs0, rs1, rs2, RANK)[:, None] + cols
        b_r = tl.load(r_ptr + o_r, mask=mask, other=0.0).to(COMPUTE)
        b_h = _residual_sum(b_h, b_r, x_ptr.dtype.element_ty, COMPUTE)
        tl.store(h_ptr + o_y, round_to(b_h, h_ptr.dtype.element_ty), mask=mask)
    rstd = reciprocal_rms(tl.sum(b_h * b_h, 1), n_cols, eps)  # [R]
    if SAVE_RSTD:
        tl.store(rstd_ptr + rows, rstd, mask=rows < n_rows)
    b_y = _scaled(b_h, rstd[:, None], w_ptr, cols, m_cols, offset, x_ptr.dtype.element_ty, y_ptr.dtype.element_ty,
                  HAS_WEIGHT, ROUND_FIRST, COMPUTE)  # fmt: skip
    tl.store(y_ptr + o_y, b_y, mask=mask)


@triton.jit
def rms_norm_fwd_wide_kernel(
    x_ptr, r_ptr, w_ptr, y_ptr, h_ptr, rstd_ptr,
    n_rows, n_cols, n1, n2, xs0, xs1, xs2, rs0, rs1, rs2, eps, offset,
    RANK: tl.constexpr, HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr,
    SAVE_RSTD: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """One program a row, walked twice. The sum x + residual is formed twice rather than read back from h: that would
    need the writes of other threads."""
    row = tl.program_id(0).to(tl.int64)
    o_x = row_offset(row, n1, n2, xs0, xs1, xs2, RANK)
    o_r = row_offset(row, n1, n2, rs0, rs1, rs2, RANK)
    b_sum = tl.zeros([1, BLOCK_COLS], COMPUTE)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)[None, :]
        mask = cols < n_cols
        b_h = tl.load(x_ptr + o_x + cols, mask=mask, other=0.0).to(COMPUTE)
        if HAS_RESIDUAL:
            b_r = tl.load(r_ptr + o_r + cols, mask=mask, other=0.0).to(COMPUTE)
            b_h = _residual_sum(b_h, b_r, x_ptr.dtype.element_ty, COMPUTE)
        b_sum += b_h * b_h
    rstd = reciprocal_rms(tl.sum(b_sum, 1), n_cols, eps)  # [1]
    if SAVE_RSTD:
        tl.store(rstd_ptr + row + tl.arange(0, 1), rstd)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)[None, :]
        mask = cols < n_cols
        b_h = tl.load(x_ptr + o_x + cols, mask=mask, other=0.0).to(COMPUTE)
        if HAS_RESIDUAL:
            b_r = tl.load(r_ptr + o_r + cols, mask=mask, other=0.0).to(COMPUTE)
            b_h = _residual_sum(b_h, b_r, x_ptr.dtype.element_ty, COMPUTE)
            tl.store(h_ptr + row * n_cols + cols, round_to(b_h, h_ptr.dtype.element_ty), mask=mask)
        b_y = _scaled(b_h, rstd[:, None], w_ptr, cols, mask, offset, x_ptr.dtype.element_ty, y_ptr.dtype.element_ty,
                      HAS_WEIGHT, ROUND_FIRST, COMPUTE)  # fmt: skip
        tl.store(y_ptr + row * n_cols + cols, b_y, mask=mask)


@triton.jit
def rms_norm_bwd_kernel(
    dy_ptr, dh_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr,
    n_rows, n_cols, n1, n2, gs0, gs1, gs2, hs0, hs1, hs2, xs0, xs1, xs2, offset,
    RANK: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Rows that fit in registers. Program p takes tiles p, p + programs, ...; dw_ptr is [programs, n_cols]."""
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    m_cols = cols < n_cols
    if HAS_WEIGHT:
        b_w = tl.load(w_ptr + cols, mask=m_cols, other=0.0).to(COMPUTE) + offset  # [1, C]
    b_dw = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
    program = tl.program_id(0).to(tl.int64)
    for tile in range(program, tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0)):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)  # [R]
        mask = (rows < n_rows)[:, None] & m_cols
        o_x = row_offset(rows, n1, n2, xs0, xs1, xs2, RANK)[:, None] + cols
        o_dy = row_offset(rows, n1, n2, gs0, gs1, gs2, RANK)[:, None] + cols
        b_x = tl.load(x_ptr + o_x, mask=mask, other=0.0).to(COMPUTE)  # [R, C]
        b_dy = tl.load(dy_ptr + o_dy, mask=mask, other=0.0).to(COMPUTE)
        rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        if NEED_DW:
            b_dw += b_dy * normalized(b_x, rstd, x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
        if NEED_DX:
            b_v = b_dy * b_w if HAS_WEIGHT else b_dy
            b_n = b_x * rstd
            b_dx = rstd * (b_v - b_n * (tl.sum(b_v * b_n, 1)[:, None] / n_cols))
            if HAS_DH:
                o_dh = row_offset(rows, n1, n2, hs0, hs1, hs2, RANK)[:, None] + cols
                b_dx += tl.load(dh_ptr + o_dh, mask=mask, other=0.0).to(COMPUTE)
            tl.store(dx_ptr + (rows * n_cols)[:, None] + cols, round_to(b_dx, dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DW:
        o_dw = program * n_cols + cols
        tl.store(dw_ptr + o_dw, tl.sum(b_dw, 0)[None, :], mask=m_cols)


@triton.jit
def rms_norm_bwd_wide_kernel(
    dy_ptr, dh_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr,
    n_rows, n_cols, n1, n2, gs0, gs1, gs2, hs0, hs1, hs2, xs0, xs1, xs2, offset,
    RANK: tl.constexpr, HAS_DH: tl.constexpr, HAS_WEIGHT: tl.constexpr, ROUND_FIRST: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DW: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Rows walked in blocks of columns. dw_ptr [programs, n_cols] starts at zero; a program adds to its own row of it,
    each thread to the elements that it alone reads and writes."""
    program = tl.program_id(0).to(tl.int64)
    for row in range(program, n_rows, tl.num_programs(0)):
        o_x = row_offset(row, n1, n2, xs0, xs1, xs2, RANK)
        o_dy = row_offset(row, n1, n2, gs0, gs1, gs2, RANK)
        o_dh = row_offset(row, n1, n2, hs0, hs1, hs2, RANK)
        rstd = tl.load(rstd_ptr + row)
        b_sum = tl.zeros([BLOCK_COLS], COMPUTE)
        if NEED_DX:
            for start in range(0, n_cols, BLOCK_COLS):
                cols = start + tl.arange(0, BLOCK_COLS)
                mask = cols < n_cols
                b_v = tl.load(dy_ptr + o_dy + cols, mask=mask, other=0.0).to(COMPUTE)
                if HAS_WEIGHT:
                    b_v *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(COMPUTE) + offset
                b_sum += b_v * (tl.load(x_ptr + o_x + cols, mask=mask, other=0.0).to(COMPUTE) * rstd)
        mean = tl.sum(b_sum, 0) / n_cols
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            mask = cols < n_cols
            b_x = tl.load(x_ptr + o_x + cols, mask=mask, other=0.0).to(COMPUTE)
            b_dy = tl.load(dy_ptr + o_dy + cols, mask=mask, other=0.0).to(COMPUTE)
            if NEED_DW:
                p_dw = dw_ptr + program * n_cols + cols
                b_dw = b_dy * normalized(b_x, rstd, x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
                tl.store(p_dw, tl.load(p_dw, mask=mask, other=0.0) + b_dw, mask=mask)
            if NEED_DX:
                if HAS_WEIGHT:
                    b_dy *= tl.load(w_ptr + cols, mask=mask, other=0.0).to(COMPUTE) + offset
                b_dx = rstd * (b_dy - b_x * rstd * mean)
                if HAS_DH:
                    b_dx += tl.load(dh_ptr + o_dh + cols, mask=mask, other=0.0).to(COMPUTE)
                tl.store(dx_ptr + row * n_cols + cols, round_to(b_dx, dx_ptr.dtype.element_ty), mask=mask)


def config(n_cols: int, *, backward: bool, roomy: bool = False) -> dict[str, Any]:
    """Tile, warps and kernel for rows of `n_cols`: 16 values a thread forward and 8 backward, 4 to 32 warps.

    `wide` rows do not fit in registers; a forward pass that is `roomy` (half precision, no residual) holds longer ones.
    What fits was read off the compiler for compute capabilities 8.0 to 12.0: rows whose width is no multiple of 8 need
    more address arithmetic. `maxnreg` says how many registers there are; without it ptxas spills some for an occupancy
    that it guesses at.
    """
    limit = (8192 if n_cols % 8 == 0 else 4096) if backward else (32768 if roomy else 16384)
    if n_cols > limit:
        return {"BLOCK_ROWS": 1, "BLOCK_COLS": _WIDE_BLOCK, "num_warps": 8, "wide": True}
    block = triton.next_power_of_2(n_cols)
    rows = max(1, min(32, 2048 // block))
    warps = max(4, min(16 if backward else 32, rows * block // (256 if backward else 512)))
    registers = min(255, 65536 // (32 * warps))
    return {"BLOCK_ROWS": rows, "BLOCK_COLS": block, "num_warps": warps, "maxnreg": registers, "wide": False}


def _y_dtype(x: Tensor, weight: Tensor | None, round_before_weight: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if round_before_weight and weight is not None else x.dtype


def _empty_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, round_before_weight: bool, save_rstd: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=_y_dtype(x, weight, round_before_weight), device=x.device)
    h = torch.empty(x.shape if residual is not None else (0,), dtype=x.dtype, device=x.device)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rstd = torch.empty(x.shape[:-1] if save_rstd else (0,), dtype=compute, device=x.device)
    return y, h, rstd


def _fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    save_rstd: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    y, h, rstd = _empty_fwd(x, residual, weight, round_before_weight, save_rstd)
    if x.numel() == 0:
        return y, h, rstd
    layout = row_strides(x, residual)
    if layout is None:
        x, residual = x.contiguous(), None if residual is None else residual.contiguous()
        layout = row_strides(x, residual)
    assert layout is not None
    rank, n1, n2, (xs, rs) = layout
    weight = None if weight is None else weight.contiguous()
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    launch = config(n_cols, backward=False, roomy=x.element_size() == 2 and residual is None)
    kernel = rms_norm_fwd_wide_kernel if launch.pop("wide") else rms_norm_fwd_kernel
    kernel[(triton.cdiv(n_rows, launch["BLOCK_ROWS"]),)](
        x, residual, weight, y, h, rstd, n_rows, n_cols, n1, n2, *xs, *rs, eps, weight_offset,
        RANK=rank, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, ROUND_FIRST=round_before_weight,
        SAVE_RSTD=save_rstd, COMPUTE=compute_dtype(x.dtype), **launch,
    )  # fmt: skip
    return y, h, rstd


def _empty_bwd(x: Tensor, weight: Tensor | None, need_dx: bool, need_dw: bool) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device)
    kept = weight if need_dw and weight is not None else x.new_empty(0)
    return dx, torch.empty(kept.shape, dtype=kept.dtype, device=x.device)


def _bwd(
    dy: Tensor,
    dh: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    weight_offset: float,
    round_before_weight: bool,
    need_dx: bool,
    need_dw: bool,
) -> tuple[Tensor, Tensor]:
    dx, dw = _empty_bwd(x, weight, need_dx, need_dw)
    if x.numel() == 0:
        return dx, dw.zero_()
    if not (need_dx or need_dw):
        return dx, dw
    layout = row_strides(dy, dh, x)
    if layout is None:
        dy, dh, x = dy.contiguous(), None if dh is None else dh.contiguous(), x.contiguous()
        layout = row_strides(dy, dh, x)
    assert layout is not None
    rank, n1, n2, (gs, hs, xs) = layout
    weight = None if weight is None else weight.contiguous()
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    launch = config(n_cols, backward=True)
    wide = launch.pop("wide")
    grid = min(triton.cdiv(n_rows, launch["BLOCK_ROWS"]), programs(x.device))
    partial = None
    if need_dw:
        partial = (torch.zeros if wide else torch.empty)((grid, n_cols), dtype=rstd.dtype, device=x.device)
    (rms_norm_bwd_wide_kernel if wide else rms_norm_bwd_kernel)[(grid,)](
        dy, dh, x, weight, rstd, dx, partial, n_rows, n_cols, n1, n2, *gs, *hs, *xs, weight_offset,
        RANK=rank, HAS_DH=dh is not None, HAS_WEIGHT=weight is not None, ROUND_FIRST=round_before_weight,
        NEED_DX=need_dx, NEED_DW=need_dw, COMPUTE=compute_dtype(x.dtype), **launch,
    )  # fmt: skip
    if partial is not None:
        sum_partials(partial, dw)
    return dx, dw


_rms_norm_fwd = define(
    "triton_rms_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, "
    "bool round_before_weight, bool save_rstd) -> (Tensor y, Tensor h, Tensor rstd)",
    _fwd,
    lambda x, residual, weight, eps, offset, rounded, save_rstd: _empty_fwd(x, residual, weight, rounded, save_rstd),
)
_rms_norm_bwd = define(
    "triton_rms_norm_bwd(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, "
    "bool round_before_weight, bool need_dx, bool need_dw) -> (Tensor dx, Tensor dw)",
    _bwd,
    lambda dy, dh, x, weight, rstd, offset, rounded, need_dx, need_dw: _empty_bwd(x, weight, need_dx, need_dw),
)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        weight_offset: float,
        round_before_weight: bool,
    ) -> Any:
        ctx.set_materialize_grads(False)  # zeros would cost a pass, and are no DTensor where the outputs are
        y, h, rstd = _rms_norm_fwd(x, residual, weight, eps, weight_offset, round_before_weight, True)
        ctx.save_for_backward(x if residual is None else h, weight, rstd)
        ctx.options = (weight_offset, round_before_weight)
        if residual is not None and not (x.requires_grad or residual.requires_grad):
            ctx.mark_non_differentiable(h)
        return y if residual is None else (y, h)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None) -> Any:
        refuse_second_derivative("rms_norm")
        x, weight, rstd = ctx.saved_tensors
        need_x, need_residual, need_dw = ctx.needs_input_grad[:3]
        need_dx = need_x or need_residual
        if dy is None:  # the gradient of h passes the sum, and nothing reaches the weight
            return dh if need_x else None, dh if need_residual else None, None, None, None, None
        dx, dw = _rms_norm_bwd(dy, dh, x, weight, rstd, *ctx.options, need_dx, need_dw)
        # The sum passes one gradient to both of its terms.
        return dx if need_x else None, dx if need_residual else None, dw if need_dw else None, None, None, None


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_weight: bool) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or (weight is not None and weight.requires_grad)):
        return _RMSNorm.apply(x, None, weight, eps, weight_offset, round_before_weight)
    return _rms_norm_fwd(x, None, weight, eps, weight_offset, round_before_weight, False)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_weight: bool
) -> tuple[Tensor, Tensor]:
    if torch.is_grad_enabled() and (
        x.requires_grad or residual.requires_grad or (weight is not None and weight.requires_grad)
    ):
        return _RMSNorm.apply(x, residual, weight, eps, weight_offset, round_before_weight)
    y, h, _ = _rms_norm_fwd(x, residual, weight, eps, weight_offset, round_before_weight, False)
    return y, h
