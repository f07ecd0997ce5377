"""RMSNorm in Triton: launches, operators and their gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._launch import Plan, launch, planned
from foundry_kernels._triton import (
    capability,
    compute_dtype,
    contiguous,
    define,
    empty_like,
    most_warps,
    programs,
    refuse_second_derivative,
    row_strides,
    strides_of,
    sum_partials,
)
from foundry_kernels.ops.rms_norm.triton.kernels import (
    rms_norm_bwd_kernel,
    rms_norm_bwd_wide_kernel,
    rms_norm_fwd_kernel,
    rms_norm_fwd_wide_kernel,
)
from foundry_kernels.tuning import choose

_WIDE_BLOCK = 4096


def config(n_cols: int, *, backward: bool, needs_few_registers: bool = False, capability: int = 0) -> dict[str, Any]:
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
    warps = max(4, min(16 if backward else most_warps(capability), rows * block // (256 if backward else 512)))
    registers = min(255, 65536 // (32 * warps))
    return {"BLOCK_ROWS": rows, "BLOCK_COLS": block, "num_warps": warps, "maxnreg": registers, "wide": False}


#: Shared memory of a multiprocessor in KB, less than it has, by class of device; 8.6, 8.9 and 12.x have 100.
_SHARED_KB = {80: 160, 87: 160, 90: 224, 100: 224, 103: 224}


def _stages(row: dict[str, Any], row_bytes: int, capability: int) -> dict[str, Any]:
    """`row` of a backward pass, with the loads of two tiles ahead in flight where shared memory has room for two
    programs' tiles. They take the place of registers, so that two programs of 16 warps fit where one did."""
    tile = 2 * row["BLOCK_ROWS"] * row_bytes
    if 2 * tile > _SHARED_KB.get(capability, 96) << 10:
        return row | {"STAGES": 1}
    of_two = row["maxnreg"] if row["BLOCK_COLS"] > 4096 else min(255, 32768 // (32 * row["num_warps"]))
    return row | {"STAGES": 3, "maxnreg": of_two if of_two >= 64 else row["maxnreg"]}


def rows(
    n_cols: int,
    *,
    backward: bool,
    needs_few_registers: bool = False,
    row_bytes: int | None = None,
    capability: int = 0,
) -> list[dict[str, Any]]:
    """`config` and what `python -m foundry_kernels tune` tries beside it: other numbers of warps and of rows a tile.
    Rows of other widths than multiples of 16 are left as they are: their registers would have to be looked at.

    row_bytes: of all that a backward pass reads of a row, where that is regular (one row after the other, aligned);
    None where it is not, and nothing is loaded ahead.
    """
    own = config(n_cols, backward=backward, needs_few_registers=needs_few_registers, capability=capability)
    if own["wide"]:
        return [own]
    if n_cols % 16 != 0 or (backward and row_bytes is None):
        return [own | {"STAGES": 1} if backward else own]

    def row(tile_rows: int, warps: int) -> dict[str, Any]:
        registers = min(255, 65536 // (32 * warps))
        found = own | {"BLOCK_ROWS": tile_rows, "num_warps": warps, "maxnreg": registers}
        if row_bytes is None:
            return found
        masked = n_cols < own["BLOCK_COLS"]
        if capability // 10 == 10 and masked and own["BLOCK_COLS"] > 4096:  # compiled for 10.0 it spills 8 bytes
            return found | {"STAGES": 1}
        return _stages(found, row_bytes, capability)

    tile, warps = own["BLOCK_ROWS"], own["num_warps"]
    found = [row(tile, warps)]
    if backward:
        found.append(own | {"STAGES": 1})
    for n, w in ((tile, warps // 2), (tile, 2 * warps), (2 * tile, warps), (2 * tile, 2 * warps), (tile // 2, warps)):
        if n >= 1 and 1 <= w <= most_warps(capability) and row(n, w) not in found:
            found.append(row(n, w))
    return found


def _choose(kernel: str, dtype: torch.dtype, device: torch.device, found: list[dict[str, Any]]) -> dict[str, Any]:
    """The row for a launch. "wide" says which kernel it is for, and is not an option of the kernel's."""
    if found[0]["wide"]:
        return found[0]
    plain = [{name: value for name, value in row.items() if name != "wide"} for row in found]
    return choose(kernel, f"{8 * dtype.itemsize}-bit", plain, device) | {"wide": False}


def _y_dtype(x: Tensor, weight: Tensor | None, round_before_weight: bool) -> torch.dtype:
    return torch.promote_types(x.dtype, weight.dtype) if round_before_weight and weight is not None else x.dtype


def _empty_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, round_before_weight: bool, save_rstd: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    y_dtype = _y_dtype(x, weight, round_before_weight)
    y = empty_like(x) if y_dtype == x.dtype else torch.empty(x.shape, dtype=y_dtype, device=x.device)
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    rstd = torch.empty(x.shape[:-1], dtype=compute, device=x.device) if save_rstd else None
    return y, None if residual is None else empty_like(x), rstd


@planned
def _plan_fwd(
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    residual_strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
    has_weight: bool,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    save_rstd: bool,
) -> tuple[bool, Plan] | None:
    """Whether rows are wide, and the launch; None where x and residual must be copied first."""
    layout = row_strides(shape, x_strides, residual_strides)
    if layout is None:
        return None
    rank, n1, n2, (x_rows, residual_rows) = layout
    has_residual = residual_strides is not None
    n_cols = shape[-1]
    n_rows = math.prod(shape[:-1])
    few = dtype.itemsize == 2 and not has_residual
    found = rows(n_cols, backward=False, needs_few_registers=few, capability=capability(device))
    options = _choose("rms_norm_fwd_kernel", dtype, device, found)
    wide = options.pop("wide")
    constants = dict(
        RANK=rank, HAS_RESIDUAL=has_residual, HAS_WEIGHT=has_weight, ROUND_FIRST=round_before_weight,
        SAVE_RSTD=save_rstd, COMPUTE=compute_dtype(dtype), **options,
    )  # fmt: skip
    grid = (triton.cdiv(n_rows, options["BLOCK_ROWS"]),)
    return wide, Plan(grid, (n_rows, n_cols, n1, n2, *x_rows, *residual_rows, eps, weight_offset), constants)


def _fwd(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    save_rstd: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    y, h, rstd = _empty_fwd(x, residual, weight, round_before_weight, save_rstd)
    if y.numel() == 0:
        return y, h, rstd
    options = x.dtype, x.device, weight is not None, eps, weight_offset, round_before_weight, save_rstd
    found = _plan_fwd(x.shape, x.stride(), strides_of(residual), *options)
    if found is None:
        x, residual = x.contiguous(), contiguous(residual)
        found = _plan_fwd(x.shape, x.stride(), strides_of(residual), *options)
        assert found is not None
    wide, plan = found
    kernel = rms_norm_fwd_wide_kernel if wide else rms_norm_fwd_kernel
    launch(kernel, plan, x, residual, contiguous(weight), y, h, rstd)
    return y, h, rstd


def _empty_bwd(x: Tensor, weight: Tensor | None, need_dx: bool, need_dw: bool) -> tuple[Tensor | None, Tensor | None]:
    return empty_like(x) if need_dx else None, empty_like(weight) if need_dw and weight is not None else None


@planned
def _plan_bwd(
    shape: tuple[int, ...],
    dy_strides: tuple[int, ...],
    dh_strides: tuple[int, ...] | None,
    x_strides: tuple[int, ...],
    dtype: torch.dtype,
    has_weight: bool,
    device: torch.device,
    weight_offset: float,
    round_before_weight: bool,
    need_dx: bool,
    need_dw: bool,
) -> tuple[bool, Plan] | None:
    """Whether rows are wide, and the launch; None where dy, dh and x must be copied first."""
    layout = row_strides(shape, dy_strides, dh_strides, x_strides)
    if layout is None:
        return None
    rank, n1, n2, (dy_rows, dh_rows, x_rows) = layout
    n_cols = shape[-1]
    n_rows = math.prod(shape[:-1])
    regular = rank == 1 and all(stride % 16 == 0 for *_, stride in (dy_rows, dh_rows, x_rows))
    row_bytes = (2 + (dh_strides is not None)) * triton.next_power_of_2(n_cols) * dtype.itemsize if regular else None
    found = rows(n_cols, backward=True, row_bytes=row_bytes, capability=capability(device))
    options = _choose("rms_norm_bwd_kernel", dtype, device, found)
    wide = options.pop("wide")
    constants = dict(
        RANK=rank, HAS_DH=dh_strides is not None, HAS_WEIGHT=has_weight, ROUND_FIRST=round_before_weight,
        NEED_DX=need_dx, NEED_DW=need_dw, COMPUTE=compute_dtype(dtype), **options,
    )  # fmt: skip
    grid = (min(triton.cdiv(n_rows, options["BLOCK_ROWS"]), programs(device)),)
    return wide, Plan(grid, (n_rows, n_cols, n1, n2, *dy_rows, *dh_rows, *x_rows, weight_offset), constants)


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
) -> tuple[Tensor | None, Tensor | None]:
    dx, dw = _empty_bwd(x, weight, need_dx, need_dw)
    if x.numel() == 0:
        return dx, None if dw is None else dw.zero_()
    if dx is None and dw is None:
        return dx, dw
    options = x.dtype, weight is not None, x.device, weight_offset, round_before_weight, need_dx, dw is not None
    found = _plan_bwd(x.shape, dy.stride(), strides_of(dh), x.stride(), *options)
    if found is None:
        dy, dh, x = dy.contiguous(), contiguous(dh), x.contiguous()
        found = _plan_bwd(x.shape, dy.stride(), strides_of(dh), x.stride(), *options)
        assert found is not None
    wide, plan = found
    partial = None
    if dw is not None:
        partial = (rstd.new_zeros if wide else rstd.new_empty)((plan.grid[0], x.shape[-1]))
    kernel = rms_norm_bwd_wide_kernel if wide else rms_norm_bwd_kernel
    launch(kernel, plan, dy, dh, x, contiguous(weight), rstd, dx, partial)
    if partial is not None and dw is not None:
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
) -> tuple[Tensor, Tensor | None, Tensor | None]:
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
) -> tuple[Tensor | None, Tensor | None]:
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
