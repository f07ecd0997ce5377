"""activation(x + bias) in Triton, followed by dropout (`core.dropout`) with DROPOUT.

Forward: a program computes one block of rows and columns. Backward: several programs share a block of columns and take
its rows in turns. Each loads the bias once and sums the bias's gradient over its rows in float32. One more kernel sums
over the programs and rounds. There are no atomics, so gradients are bitwise deterministic on one device.

Names: `row_offset` finds a row of x by n1, n2 and stride_x0, stride_x1, stride_x2; b_ is a block of values, o_ offsets,
m_ a mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._triton.activations import activated, derivative, gate_factor, times_slope
from foundry_kernels._triton.devices import programs
from foundry_kernels._triton.functions import dropout_factors, round_to, row_offset
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import apply, define, requires_grad
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous, empty_like, row_strides, sum_partials
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.dropout import NO_DROPOUT, DropoutOptions, kernel_numbers
from foundry_kernels.core.inference import refuse_second_derivative


@triton.jit
def _bias(bias_ptr, cols, m_cols, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr):
    """The bias [1, C], or zeros."""
    if HAS_BIAS:
        return tl.load(bias_ptr + cols, mask=m_cols, other=0.0).to(COMPUTE)
    return tl.zeros_like(cols).to(COMPUTE)


@triton.jit
def bias_act_fwd_kernel(
    x_ptr, bias_ptr, y_ptr, seed_ptr,
    n_rows, n_cols, n_tiles, n1, n2, stride_x0, stride_x1, stride_x2, threshold, scale,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = (program // n_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
    cols = ((program % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]  # [1, C]
    m_cols = cols < n_cols
    mask = (rows < n_rows)[:, None] & m_cols
    o_x = row_offset(rows, n1, n2, stride_x0, stride_x1, stride_x2, RANK)[:, None] + cols
    b_z = tl.load(x_ptr + o_x, mask=mask, other=0.0).to(COMPUTE) + _bias(bias_ptr, cols, m_cols, HAS_BIAS, COMPUTE)
    b_y = activated(b_z, gate_factor(b_z, ACTIVATION), ACTIVATION)
    if DROPOUT:
        start = (program % n_tiles) * BLOCK_COLS
        shape: tl.constexpr = [BLOCK_ROWS, BLOCK_COLS]
        b_y = b_y * dropout_factors(seed_ptr, rows[:, None], start, threshold, scale, shape, BLOCK_COLS)
    tl.store(y_ptr + (rows * n_cols)[:, None] + cols, round_to(b_y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bias_act_bwd_kernel(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, partial_ptr, seed_ptr,
    n_rows, n_cols, n_tiles, n1, n2, stride_dy0, stride_dy1, stride_dy2, stride_x0, stride_x1, stride_x2,
    threshold, scale,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, DROPOUT: tl.constexpr,
    NEED_DX: tl.constexpr, NEED_DBIAS: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """partial_ptr is [programs that share columns, n_cols]."""
    cols = ((tl.program_id(0) % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]  # [1, C]
    program = (tl.program_id(0) // n_tiles).to(tl.int64)
    m_cols = cols < n_cols
    b_bias = _bias(bias_ptr, cols, m_cols, HAS_BIAS, COMPUTE)
    b_dbias = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
    sharing = tl.num_programs(0) // n_tiles
    start = (tl.program_id(0) % n_tiles) * BLOCK_COLS
    shape: tl.constexpr = [BLOCK_ROWS, BLOCK_COLS]
    for tile in tl.range(program, tl.cdiv(n_rows, BLOCK_ROWS), sharing, num_stages=STAGES):
        rows = tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS).to(tl.int64)  # [R]
        mask = (rows < n_rows)[:, None] & m_cols
        o_x = row_offset(rows, n1, n2, stride_x0, stride_x1, stride_x2, RANK)[:, None] + cols
        o_dy = row_offset(rows, n1, n2, stride_dy0, stride_dy1, stride_dy2, RANK)[:, None] + cols
        b_x = tl.load(x_ptr + o_x, mask=mask, other=0.0).to(COMPUTE)  # [R, C]
        b_dy = tl.load(dy_ptr + o_dy, mask=mask, other=0.0).to(COMPUTE)
        if DROPOUT:
            b_dy = b_dy * dropout_factors(seed_ptr, rows[:, None], start, threshold, scale, shape, BLOCK_COLS)
        b_z = b_x + b_bias
        b_dz = times_slope(b_dy, derivative(b_z, gate_factor(b_z, ACTIVATION), ACTIVATION), ACTIVATION)
        if NEED_DBIAS:
            b_dbias += b_dz
        if NEED_DX:
            tl.store(dx_ptr + (rows * n_cols)[:, None] + cols, round_to(b_dz, dx_ptr.dtype.element_ty), mask=mask)
    if NEED_DBIAS:
        tl.store(partial_ptr + program * n_cols + cols, tl.sum(b_dbias, 0)[None, :], mask=m_cols)


def configs(n_rows: int, n_cols: int, *, backward: bool, regular: bool = False) -> list[dict[str, int]]:
    """Returns launch configs: the default, then those that `python -m foundry_kernels tune` tries. A thread has 8
    elements. In the backward pass, blocks of many rows are narrow, so that many programs share the rows. If rows are
    `regular` (contiguous and aligned), the loads of two blocks are prefetched."""
    found: list[dict[str, int]] = []
    if backward:
        shapes: tuple[tuple[int, int, int], ...] = ((256, 2048, 8), (128, 2048, 8), (512, 2048, 8), (256, 1024, 4))
        stages = [{"STAGES": n} for n in ((3, 1) if regular else (1,))]
    else:
        shapes, stages = ((1024, 1024, 4), (1024, 2048, 8), (512, 1024, 4), (2048, 2048, 8)), [{}]
    for narrow, elements, warps in shapes:
        few = elements // triton.next_power_of_2(n_rows)  # few rows: blocks are wider
        cols = min(max(narrow, few), triton.next_power_of_2(n_cols))
        tile = min(elements // cols, triton.next_power_of_2(n_rows))
        for more in stages:
            row = {"BLOCK_ROWS": tile, "BLOCK_COLS": cols, "num_warps": warps, **more}
            if row not in found:
                found.append(row)
    return found


def _choose(
    kernel: str, dtype: torch.dtype, activation: str, found: list[dict[str, int]], device: torch.device, dropout: bool
) -> dict[str, int]:
    if dropout:  # not tuned; a counter of the generator covers four columns
        return found[0] | {"BLOCK_COLS": max(4, found[0]["BLOCK_COLS"])}
    return choose(kernel, f"{8 * dtype.itemsize}-bit {activation}", found, device)


@planned
def _plan_fwd(
    shape: tuple[int, ...],
    x_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    has_bias: bool,
    activation: str,
    dropout_p: float | None,
) -> Plan | None:
    """None if x must be copied first."""
    layout = row_strides(shape, x_strides)
    if layout is None:
        return None
    rank, n1, n2, (x_rows,) = layout
    n_rows, n_cols = math.prod(shape[:-1]), shape[-1]
    found = configs(n_rows, n_cols, backward=False)
    block = _choose("bias_act_fwd_kernel", dtype, activation, found, device, dropout_p is not None)
    n_tiles = triton.cdiv(n_cols, block["BLOCK_COLS"])
    constants = {"RANK": rank, "ACTIVATION": activation, "HAS_BIAS": has_bias, "DROPOUT": dropout_p is not None}
    constants |= {"COMPUTE": compute_dtype(dtype)} | block
    grid = (triton.cdiv(n_rows, block["BLOCK_ROWS"]) * n_tiles,)
    numbers = n_rows, n_cols, n_tiles, n1, n2, *x_rows, *kernel_numbers(dropout_p)
    return Plan(grid, numbers, constants)


def _p(dropout: DropoutOptions) -> float | None:
    return None if dropout.dropout_seed is None else dropout.dropout_p


def _fwd(x: Tensor, bias: Tensor | None, activation: str, dropout: DropoutOptions) -> Tensor:
    y = empty_like(x)
    if y.numel() == 0:
        return y
    options = x.dtype, x.device, bias is not None, activation, _p(dropout)
    plan = _plan_fwd(x.shape, x.stride(), *options)
    if plan is None:
        return _fwd(x.contiguous(), bias, activation, dropout)
    launch(bias_act_fwd_kernel, plan, x, contiguous(bias), y, dropout.dropout_seed)
    return y


@planned
def _plan_bwd(
    shape: tuple[int, ...],
    dy_strides: tuple[int, ...],
    x_strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    has_bias: bool,
    activation: str,
    need_dx: bool,
    need_dbias: bool,
    dropout_p: float | None,
) -> tuple[int, Plan] | None:
    """Returns the number of programs that share the rows, and the launch; None if dy and x must be copied first."""
    layout = row_strides(shape, dy_strides, x_strides)
    if layout is None:
        return None
    rank, n1, n2, (dy_rows, x_rows) = layout
    n_rows, n_cols = math.prod(shape[:-1]), shape[-1]
    regular = rank == 1 and all(stride % 16 == 0 for *_, stride in (dy_rows, x_rows))
    found = configs(n_rows, n_cols, backward=True, regular=regular)
    block = _choose("bias_act_bwd_kernel", dtype, activation, found, device, dropout_p is not None)
    n_tiles = triton.cdiv(n_cols, block["BLOCK_COLS"])
    sharing = min(triton.cdiv(n_rows, block["BLOCK_ROWS"]), max(1, 2 * programs(device) // n_tiles))
    constants = dict(
        RANK=rank, ACTIVATION=activation, HAS_BIAS=has_bias, DROPOUT=dropout_p is not None, NEED_DX=need_dx,
        NEED_DBIAS=need_dbias, COMPUTE=compute_dtype(dtype), **block,
    )  # fmt: skip
    numbers = n_rows, n_cols, n_tiles, n1, n2, *dy_rows, *x_rows, *kernel_numbers(dropout_p)
    return sharing, Plan((sharing * n_tiles,), numbers, constants)


def _empty_bwd(x: Tensor, bias: Tensor | None, need_dx: bool, need_dbias: bool) -> tuple[Tensor | None, Tensor | None]:
    return empty_like(x) if need_dx else None, empty_like(bias) if need_dbias and bias is not None else None


def _bwd(
    dy: Tensor,
    x: Tensor,
    bias: Tensor | None,
    activation: str,
    need_dx: bool,
    need_dbias: bool,
    dropout: DropoutOptions,
) -> tuple[Tensor | None, Tensor | None]:
    dx, dbias = _empty_bwd(x, bias, need_dx, need_dbias)
    if x.numel() == 0:
        return dx, None if dbias is None else dbias.zero_()
    if dx is None and dbias is None:
        return dx, dbias
    needed = dx is not None, dbias is not None
    options = x.dtype, x.device, bias is not None, activation, *needed, _p(dropout)
    found = _plan_bwd(x.shape, dy.stride(), x.stride(), *options)
    if found is None:
        return _bwd(dy.contiguous(), x.contiguous(), bias, activation, need_dx, need_dbias, dropout)
    sharing, plan = found
    partial = None
    if dbias is not None:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        partial = torch.empty((sharing, x.shape[-1]), dtype=wide, device=x.device)
    launch(bias_act_bwd_kernel, plan, dy, x, contiguous(bias), dx, partial, dropout.dropout_seed)
    if partial is not None and dbias is not None:
        sum_partials(partial, dbias)
    return dx, dbias


_bias_act_fwd = define(
    f"triton_bias_act_fwd(Tensor x, Tensor? bias, str activation, {DropoutOptions.SCHEMA}) -> Tensor",
    _fwd,
    empty_like,
    DropoutOptions,
)
_bias_act_bwd = define(
    "triton_bias_act_bwd(Tensor dy, Tensor x, Tensor? bias, str activation, bool need_dx, bool need_dbias, "
    f"{DropoutOptions.SCHEMA}) -> (Tensor dx, Tensor dbias)",
    _bwd,
    _empty_bwd,
    DropoutOptions,
)

#: The public function of an activation.
_NAMES = {"gelu": "bias_gelu", "gelu_tanh": "bias_gelu", "silu": "bias_silu", "relu": "bias_relu"}


class _BiasAct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, activation: str, dropout: DropoutOptions) -> Tensor:
        ctx.save_for_backward(x, bias, dropout.dropout_seed)
        ctx.activation, ctx.dropout_p = activation, dropout.dropout_p
        return _bias_act_fwd(x, bias, activation, dropout)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_derivative(_NAMES[ctx.activation])
        x, bias, seed = ctx.saved_tensors
        need_dx, need_dbias, *_ = ctx.needs_input_grad
        dropout = DropoutOptions(ctx.dropout_p, seed)
        dx, dbias = _bias_act_bwd(dy, x, bias, ctx.activation, need_dx, need_dbias, dropout)
        return dx if need_dx else None, dbias if need_dbias else None, None, None


def _bias_act(x: Tensor, bias: Tensor | None, activation: str, dropout_options: tuple[Any, ...]) -> Tensor:
    dropout = DropoutOptions(*dropout_options) if dropout_options else NO_DROPOUT
    if requires_grad(x, bias):
        return apply(_BiasAct, x, bias, activation, dropout)
    return _bias_act_fwd(x, bias, activation, dropout)


def bias_gelu(x: Tensor, bias: Tensor | None, approximate: str, *dropout_options: Any) -> Tensor:
    return _bias_act(x, bias, "gelu" if approximate == "none" else "gelu_tanh", dropout_options)


def bias_silu(x: Tensor, bias: Tensor | None, *dropout_options: Any) -> Tensor:
    return _bias_act(x, bias, "silu", dropout_options)


def bias_relu(x: Tensor, bias: Tensor | None, *dropout_options: Any) -> Tensor:
    return _bias_act(x, bias, "relu", dropout_options)
