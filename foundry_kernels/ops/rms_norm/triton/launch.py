"""The launches of RMSNorm and LayerNorm: tiles, warps, strides, and memory for the results."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.devices import capability, device_of, programs
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous, empty_like, row_strides, strides_of, sum_partials
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.dropout import NO_DROPOUT, DropoutOptions, kernel_numbers
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.rms_norm.options import WeightOptions
from foundry_kernels.ops.rms_norm.triton.kernels import (
    rms_norm_bwd_kernel,
    rms_norm_bwd_wide_kernel,
    rms_norm_fwd_kernel,
    rms_norm_fwd_wide_kernel,
)

_WIDE_BLOCK = 4096


def config(
    n_cols: int,
    *,
    backward: bool,
    needs_few_registers: bool = False,
    centered: bool = False,
    dropout: bool = False,
    capability: int = 0,
) -> dict[str, Any]:
    """Tile, warps and kernel for rows of `n_cols`: 16 values for each thread in the forward pass and 8 in the backward
    pass, with 4 to 32 warps.

    Rows that do not fit in registers use the `wide` kernel. A forward pass that `needs_few_registers` (half precision,
    no residual, no mean to subtract) can have longer rows. The limits come from compiling for compute capabilities 8.0
    to 12.0; rows whose width is not a multiple of 8 need more address arithmetic. `maxnreg` is the maximum for the
    warps; without it, ptxas spills some registers for an occupancy that it guesses.
    """
    limit = 32768 if needs_few_registers else 16384
    if backward:  # the longest would spill the state of the random generator
        limit = 8192 if n_cols % 8 == 0 and not dropout else 4096
    if n_cols > limit:
        cols = _WIDE_BLOCK // 2 if backward and centered else _WIDE_BLOCK
        registers = {"maxnreg": 128} if centered else {}
        return {"BLOCK_ROWS": 1, "BLOCK_COLS": cols, "num_warps": 8, "wide": True} | registers
    block = triton.next_power_of_2(n_cols)
    rows = max(1, min(32, 2048 // block))
    most_warps = 16 if backward else device_of(capability).most_warps
    warps = max(4, min(most_warps, rows * block // (256 if backward else 512)))
    registers = min(255, 65536 // (32 * warps))
    return {"BLOCK_ROWS": rows, "BLOCK_COLS": block, "num_warps": warps, "maxnreg": registers, "wide": False}


#: Shared memory of a multiprocessor that is reserved.
_RESERVED = 4 << 10
#: AMD's launches were compiled with this limit, which does not depend on the LDS. All fit, and none spills
#: (test_aot_amd.py).
_ROOM_ON_CDNA = 96 << 10


def _stages(row: dict[str, Any], row_bytes: int, capability: int) -> dict[str, Any]:
    """`row`, a config of a backward pass, which prefetches two tiles if shared memory has room for two programs' tiles.
    Prefetched tiles need no registers, so two programs of 16 warps fit instead of one."""
    tile = 2 * row["BLOCK_ROWS"] * row_bytes
    device = device_of(capability)
    if 2 * tile > (_ROOM_ON_CDNA if device.name == "cdna" else device.sm_shared - _RESERVED):
        return row | {"STAGES": 1}
    of_two = row["maxnreg"] if row["BLOCK_COLS"] > 4096 else min(255, 32768 // (32 * row["num_warps"]))
    return row | {"STAGES": 3, "maxnreg": of_two if of_two >= 64 else row["maxnreg"]}


def configs(
    n_cols: int,
    *,
    backward: bool,
    needs_few_registers: bool = False,
    centered: bool = False,
    dropout: bool = False,
    row_bytes: int | None = None,
    capability: int = 0,
) -> list[dict[str, Any]]:
    """Returns `config`, then the configs that `python -m foundry_kernels tune` tries: other numbers of warps and of
    rows per tile. Widths that are not a multiple of 16 have no alternatives, because their register use has not been
    checked.

    row_bytes: the bytes that a backward pass reads for each row if rows are regular (contiguous and aligned). None if
    they are not; then nothing is prefetched. A backward pass without dh `needs_few_registers`.
    """
    needs = {"needs_few_registers": needs_few_registers, "centered": centered, "dropout": dropout}
    own = config(n_cols, backward=backward, **needs, capability=capability)
    blackwell = device_of(capability).name == "blackwell"
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
        if blackwell and masked and own["BLOCK_COLS"] > 4096:  # would spill 8 bytes on 10.0
            return found | {"STAGES": 1}
        if dropout and row_bytes > 6 * own["BLOCK_COLS"]:  # float32 would spill 8 or 16 bytes
            return found | {"STAGES": 1}
        staged = _stages(found, row_bytes, capability)
        if centered and (dropout or (blackwell and not needs_few_registers)):  # would spill with half the registers
            return staged | {"maxnreg": registers}
        return staged

    tile, warps = own["BLOCK_ROWS"], own["num_warps"]
    found = [row(tile, warps)]
    if backward:
        found.append(own | {"STAGES": 1})
    for n, w in ((tile, warps // 2), (tile, 2 * warps), (2 * tile, warps), (2 * tile, 2 * warps), (tile // 2, warps)):
        if n >= 1 and 1 <= w <= device_of(capability).most_warps and row(n, w) not in found:
            found.append(row(n, w))
    return found


def _choose(
    kernel: str,
    dtype: torch.dtype,
    centered: bool,
    device: torch.device,
    found: list[dict[str, Any]],
    dropout: bool,
) -> dict[str, Any]:
    """The config of a launch. "wide" selects the kernel; it is not an option of the kernel."""
    if found[0]["wide"]:
        return found[0]
    if dropout:  # not tuned; a counter of the generator covers four columns
        return found[0] | {"BLOCK_COLS": max(4, found[0]["BLOCK_COLS"])}
    plain = [{name: value for name, value in row.items() if name != "wide"} for row in found]
    tags = f"{8 * dtype.itemsize}-bit{' centered' if centered else ''}"
    return choose(kernel, tags, plain, device) | {"wide": False}


#: (y, h, mean, rstd), with None for results that are not requested.
Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]
#: (dx, dw, db), with None for gradients that are not requested.
Backward = tuple[Tensor | None, Tensor | None, Tensor | None]


def empty_forward(
    x: Tensor, residual: Tensor | None, y_dtype: torch.dtype, *, save_mean: bool, save_rstd: bool
) -> Forward:
    y = empty_like(x) if y_dtype == x.dtype else torch.empty(x.shape, dtype=y_dtype, device=x.device)
    mean = _a_number_a_row(x) if save_mean else None
    return y, None if residual is None else empty_like(x), mean, _a_number_a_row(x) if save_rstd else None


def _a_number_a_row(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


@planned
def _plan_forward(
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    residual_strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
    has_weight: bool,
    has_bias: bool,
    centered: bool,
    eps: float,
    options: WeightOptions,
    save_stats: bool,
    dropout_p: float | None,
) -> tuple[bool, Plan] | None:
    """Whether rows are wide, and the launch; None if x and residual must be copied first."""
    layout = row_strides(shape, x_strides, residual_strides)
    if layout is None:
        return None
    rank, n1, n2, (x_rows, residual_rows) = layout
    has_residual = residual_strides is not None
    n_cols = shape[-1]
    n_rows = math.prod(shape[:-1])
    few = dtype.itemsize == 2 and not has_residual and not centered
    found = configs(n_cols, backward=False, needs_few_registers=few, centered=centered, capability=capability(device))
    row = _choose("rms_norm_fwd_kernel", dtype, centered, device, found, dropout_p is not None)
    wide = row.pop("wide")
    constants = dict(
        RANK=rank, HAS_RESIDUAL=has_residual, HAS_WEIGHT=has_weight, HAS_BIAS=has_bias, CENTERED=centered,
        ROUND_FIRST=options.round_before_weight, SAVE_STATS=save_stats, DROPOUT=dropout_p is not None,
        COMPUTE=compute_dtype(dtype), **row,
    )  # fmt: skip
    grid = (triton.cdiv(n_rows, row["BLOCK_ROWS"]),)
    numbers = n_rows, n_cols, n1, n2, *x_rows, *residual_rows, eps, options.weight_offset, *kernel_numbers(dropout_p)
    return wide, Plan(grid, numbers, constants)


def forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    options: WeightOptions,
    dropout: DropoutOptions,
    results: Forward,
    *,
    centered: bool = False,
) -> None:
    """Fills `results` (of `empty_forward`)."""
    y, h, mean, rstd = results
    if y.numel() == 0:
        return
    p, seed = None if dropout.dropout_seed is None else dropout.dropout_p, dropout.dropout_seed
    key = x.dtype, x.device, weight is not None, bias is not None, centered, eps, options, rstd is not None, p
    found = _plan_forward(x.shape, x.stride(), strides_of(residual), *key)
    if found is None:
        x, residual = x.contiguous(), contiguous(residual)
        found = _plan_forward(x.shape, x.stride(), strides_of(residual), *key)
        assert found is not None
    wide, plan = found
    kernel = rms_norm_fwd_wide_kernel if wide else rms_norm_fwd_kernel
    launch(kernel, plan, x, residual, contiguous(weight), contiguous(bias), y, h, mean, rstd, seed)


def empty_backward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, need_dx: bool, need_dw: bool, need_db: bool
) -> Backward:
    dw = empty_like(weight) if need_dw and weight is not None else None
    return empty_like(x) if need_dx else None, dw, empty_like(bias) if need_db and bias is not None else None


@planned
def _plan_backward(
    shape: tuple[int, ...],
    dy_strides: tuple[int, ...],
    dh_strides: tuple[int, ...] | None,
    x_strides: tuple[int, ...],
    dtype: torch.dtype,
    has_weight: bool,
    device: torch.device,
    centered: bool,
    options: WeightOptions,
    need_dx: bool,
    need_dw: bool,
    need_db: bool,
    dropout_p: float | None,
) -> tuple[bool, Plan] | None:
    """Whether rows are wide, and the launch; None if dy, dh and x must be copied first."""
    layout = row_strides(shape, dy_strides, dh_strides, x_strides)
    if layout is None:
        return None
    rank, n1, n2, (dy_rows, dh_rows, x_rows) = layout
    n_cols = shape[-1]
    n_rows = math.prod(shape[:-1])
    regular = rank == 1 and all(stride % 16 == 0 for *_, stride in (dy_rows, dh_rows, x_rows))
    row_bytes = (2 + (dh_strides is not None)) * triton.next_power_of_2(n_cols) * dtype.itemsize if regular else None
    needs = {"needs_few_registers": dh_strides is None, "centered": centered, "dropout": dropout_p is not None}
    found = configs(n_cols, backward=True, **needs, row_bytes=row_bytes, capability=capability(device))
    row = _choose("rms_norm_bwd_kernel", dtype, centered, device, found, dropout_p is not None)
    wide = row.pop("wide")
    constants = dict(
        RANK=rank, HAS_DH=dh_strides is not None, HAS_WEIGHT=has_weight, CENTERED=centered,
        ROUND_FIRST=options.round_before_weight, NEED_DX=need_dx, NEED_DW=need_dw, NEED_DB=need_db,
        DROPOUT=dropout_p is not None, COMPUTE=compute_dtype(dtype), **row,
    )  # fmt: skip
    grid = (min(triton.cdiv(n_rows, row["BLOCK_ROWS"]), programs(device)),)
    numbers = n_rows, n_cols, n1, n2, *dy_rows, *dh_rows, *x_rows, options.weight_offset, *kernel_numbers(dropout_p)
    return wide, Plan(grid, numbers, constants)


def backward(
    dy: Tensor,
    dh: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    options: WeightOptions,
    results: Backward,
    dropout: DropoutOptions = NO_DROPOUT,
    dresidual: Tensor | None = None,
    *,
    centered: bool = False,
) -> None:
    """Fills `results` (of `empty_backward`) and, with a seed and a dx, `dresidual`."""
    dx, dw, db = results
    if x.numel() == 0:
        for sums in (dw, db):
            if sums is not None:
                sums.zero_()
        return
    needed = dx is not None, dw is not None, db is not None
    if not any(needed):
        return
    p, seed = (None, None) if dropout.dropout_seed is None or dx is None else dropout
    key = x.dtype, weight is not None, x.device, centered, options, *needed, p
    found = _plan_backward(x.shape, dy.stride(), strides_of(dh), x.stride(), *key)
    if found is None:
        dy, dh, x = dy.contiguous(), contiguous(dh), x.contiguous()
        found = _plan_backward(x.shape, dy.stride(), strides_of(dh), x.stride(), *key)
        assert found is not None
    wide, plan = found
    make = rstd.new_zeros if wide else rstd.new_empty
    parts = plan.grid[0], x.shape[-1]
    dw_partial, db_partial = None if dw is None else make(parts), None if db is None else make(parts)
    kernel = rms_norm_bwd_wide_kernel if wide else rms_norm_bwd_kernel
    launch(kernel, plan, dy, dh, x, contiguous(weight), mean, rstd, dx, dw_partial, db_partial, dresidual, seed)
    if dw is not None and dw_partial is not None:
        sum_partials(dw_partial, dw)
    if db is not None and db_partial is not None:
        sum_partials(db_partial, db)
