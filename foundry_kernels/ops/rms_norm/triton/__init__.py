"""RMSNorm in Triton: launches, operators and their gradients."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton import (
    compute_dtype,
    define,
    programs,
    refuse_second_derivative,
    row_strides,
    sum_partials,
)
from foundry_kernels.ops.rms_norm.triton.kernels import (
    rms_norm_bwd_kernel,
    rms_norm_bwd_wide_kernel,
    rms_norm_fwd_kernel,
    rms_norm_fwd_wide_kernel,
)

_WIDE_BLOCK = 4096


def config(n_cols: int, *, backward: bool, needs_few_registers: bool = False) -> dict[str, Any]:
    """Tile, warps and kernel for rows of `n_cols`: 16 values a thread forward and 8 backward, 4 to 32 warps.

    Rows that do not fit in registers take the `wide` kernel. A forward pass that `needs_few_registers` (half precision,
    no residual) fits longer ones. What fits was measured with the compiler for compute capabilities 8.0 to 12.0: rows
    whose width is no multiple of 8 need more address arithmetic. `maxnreg` says how many registers there are; without
    it ptxas spills some to reach an occupancy that it guesses.
    """
    limit = (8192 if n_cols % 8 == 0 else 4096) if backward else (32768 if needs_few_registers else 16384)
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
    rank, n1, n2, (x_strides, residual_strides) = layout
    weight = None if weight is None else weight.contiguous()
    n_cols = x.shape[-1]
    n_rows = x.numel() // n_cols
    launch = config(n_cols, backward=False, needs_few_registers=x.element_size() == 2 and residual is None)
    kernel = rms_norm_fwd_wide_kernel if launch.pop("wide") else rms_norm_fwd_kernel
    kernel[(triton.cdiv(n_rows, launch["BLOCK_ROWS"]),)](
        x, residual, weight, y, h, rstd, n_rows, n_cols, n1, n2, *x_strides, *residual_strides,
        eps, weight_offset,
        RANK=rank, HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, ROUND_FIRST=round_before_weight,
        SAVE_RSTD=save_rstd, COMPUTE=compute_dtype(x.dtype), **launch,
    )  # fmt: skip
    return y, h, rstd


def _empty_bwd(x: Tensor, weight: Tensor | None, need_dx: bool, need_dw: bool) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape if need_dx else (0,), dtype=x.dtype, device=x.device)
    if not need_dw or weight is None:
        return dx, x.new_empty(0)
    return dx, torch.empty(weight.shape, dtype=weight.dtype, device=x.device)


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
    rank, n1, n2, (dy_strides, dh_strides, x_strides) = layout
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
        dy, dh, x, weight, rstd, dx, partial, n_rows, n_cols, n1, n2, *dy_strides, *dh_strides, *x_strides,
        weight_offset,
        RANK=rank, HAS_DH=dh is not None, HAS_WEIGHT=weight is not None, ROUND_FIRST=round_before_weight,
        NEED_DX=need_dx, NEED_DW=need_dw, COMPUTE=compute_dtype(x.dtype), **launch,
    )  # fmt: skip
    if partial is not None:
        sum_partials(partial, dw)
    return dx, dw


def _fwd_fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    save_rstd: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_fwd(x, residual, weight, round_before_weight, save_rstd)


def _bwd_fake(
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
    return _empty_bwd(x, weight, need_dx, need_dw)


_rms_norm_fwd = define(
    "triton_rms_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, float eps, float weight_offset, "
    "bool round_before_weight, bool save_rstd) -> (Tensor y, Tensor h, Tensor rstd)",
    _fwd,
    _fwd_fake,
)
_rms_norm_bwd = define(
    "triton_rms_norm_bwd(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor rstd, float weight_offset, "
    "bool round_before_weight, bool need_dx, bool need_dw) -> (Tensor dx, Tensor dw)",
    _bwd,
    _bwd_fake,
)


def _gradients(
    x: Tensor | None, residual: Tensor | None, weight: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
    """In the order of `_RMSNorm.forward`; eps and what follows it have none."""
    return x, residual, weight, None, None, None


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
        ctx.set_materialize_grads(False)  # zeros would cost a pass, and would not be DTensors where the outputs are
        y, h, rstd = _rms_norm_fwd(x, residual, weight, eps, weight_offset, round_before_weight, True)
        ctx.save_for_backward(x if residual is None else h, weight, rstd)
        ctx.weight_offset, ctx.round_before_weight = weight_offset, round_before_weight
        if residual is not None and not (x.requires_grad or residual.requires_grad):
            ctx.mark_non_differentiable(h)
        return y if residual is None else (y, h)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None) -> Any:
        refuse_second_derivative("rms_norm")
        x, weight, rstd = ctx.saved_tensors
        need_x, need_residual, need_dw, *_ = ctx.needs_input_grad
        if dy is None:  # the gradient of h passes through the sum, and the weight gets none
            return _gradients(dh if need_x else None, dh if need_residual else None)
        dx, dw = _rms_norm_bwd(
            dy, dh, x, weight, rstd, ctx.weight_offset, ctx.round_before_weight, need_x or need_residual, need_dw
        )
        # The sum passes one gradient to both of its terms.
        return _gradients(dx if need_x else None, dx if need_residual else None, dw if need_dw else None)


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
