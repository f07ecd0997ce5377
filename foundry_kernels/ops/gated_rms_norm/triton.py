"""RMSNorm times an activated gate in Triton.

Forward: a program computes one block of rows. Backward: programs take blocks of rows in turns, and each sums the
weight's gradient over its rows in float32; one more kernel sums over the programs and rounds. There are no atomics.

Names: `row_offset` finds a row by n1, n2 and three strides; b_ is a block of values, o_ offsets, m_ a mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foundry_kernels._triton.activations import activated, derivative, gate_factor
from foundry_kernels._triton.devices import programs
from foundry_kernels._triton.functions import normalized, reciprocal_rms, round_to, row_offset
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import define
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous, empty_like, row_strides, sum_partials
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_rms_norm.operators import BWD, FWD, make_backend


@triton.jit
def gated_rms_norm_fwd_kernel(
    x_ptr, gate_ptr, weight_ptr, y_ptr, rstd_ptr,
    n_rows, n_cols, eps, n1, n2, stride_x0, stride_x1, stride_x2, stride_g0, stride_g1, stride_g2,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, ROUND_FIRST: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    eps = tl.full([], 0.0, COMPUTE) + eps
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    mask = (rows < n_rows)[:, None] & (cols < n_cols)
    o_x = row_offset(rows, n1, n2, stride_x0, stride_x1, stride_x2, RANK)[:, None] + cols
    o_g = row_offset(rows, n1, n2, stride_g0, stride_g1, stride_g2, RANK)[:, None] + cols
    b_x = tl.load(x_ptr + o_x, mask=mask, other=0.0).to(COMPUTE)
    b_rstd = reciprocal_rms(tl.sum(b_x * b_x, 1), n_cols, eps)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + rows, b_rstd, mask=rows < n_rows)
    b_y = normalized(b_x, b_rstd[:, None], x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
    if weight_ptr is not None:
        b_y *= tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)
    b_g = tl.load(gate_ptr + o_g, mask=mask, other=0.0).to(COMPUTE)
    b_y *= activated(b_g, gate_factor(b_g, ACTIVATION), ACTIVATION)
    tl.store(y_ptr + (rows * n_cols)[:, None] + cols, round_to(b_y, y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def gated_rms_norm_bwd_kernel(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, rstd_ptr, dx_ptr, dgate_ptr, partial_ptr,
    n_rows, n_cols, n1, n2,
    stride_d0, stride_d1, stride_d2, stride_x0, stride_x1, stride_x2, stride_g0, stride_g1, stride_g2,
    RANK: tl.constexpr, ACTIVATION: tl.constexpr, ROUND_FIRST: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """partial_ptr is [programs, n_cols]."""
    cols = tl.arange(0, BLOCK_COLS)[None, :]
    m_cols = cols < n_cols
    b_dw = tl.zeros([1, BLOCK_COLS], COMPUTE)
    for tile in tl.range(tl.program_id(0), tl.cdiv(n_rows, BLOCK_ROWS), tl.num_programs(0)):
        rows = tl.cast(tile, tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [R]
        mask = (rows < n_rows)[:, None] & m_cols
        o_d = row_offset(rows, n1, n2, stride_d0, stride_d1, stride_d2, RANK)[:, None] + cols
        o_x = row_offset(rows, n1, n2, stride_x0, stride_x1, stride_x2, RANK)[:, None] + cols
        o_g = row_offset(rows, n1, n2, stride_g0, stride_g1, stride_g2, RANK)[:, None] + cols
        o_out = (rows * n_cols)[:, None] + cols
        b_rstd = tl.load(rstd_ptr + rows, mask=rows < n_rows, other=0.0)[:, None]
        b_n = tl.load(x_ptr + o_x, mask=mask, other=0.0).to(COMPUTE) * b_rstd
        b_first = normalized(b_n, 1.0, x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
        b_d = tl.load(dy_ptr + o_d, mask=mask, other=0.0).to(COMPUTE)
        b_g = tl.load(gate_ptr + o_g, mask=mask, other=0.0).to(COMPUTE)
        b_factor = gate_factor(b_g, ACTIVATION)
        b_into = b_d * activated(b_g, b_factor, ACTIVATION)
        b_scaled = b_first
        b_v = b_into
        if weight_ptr is not None:
            b_w = tl.load(weight_ptr + cols, mask=m_cols, other=0.0).to(COMPUTE)
            b_scaled = b_first * b_w
            b_v = b_into * b_w
        if dgate_ptr is not None:
            b_dgate = b_d * b_scaled * derivative(b_g, b_factor, ACTIVATION)
            tl.store(dgate_ptr + o_out, round_to(b_dgate, dgate_ptr.dtype.element_ty), mask=mask)
        if partial_ptr is not None:
            b_dw += tl.sum(b_into * b_first, 0)[None, :]
        if dx_ptr is not None:
            b_mean = tl.sum(b_v * b_n, 1)[:, None] / n_cols
            b_dx = (b_v - b_n * b_mean) * b_rstd
            tl.store(dx_ptr + o_out, round_to(b_dx, dx_ptr.dtype.element_ty), mask=mask)
    if partial_ptr is not None:
        tl.store(partial_ptr + tl.program_id(0).to(tl.int64) * n_cols + cols, b_dw, mask=m_cols)


def configs(n_rows: int, n_cols: int, element_bytes: int, backward: bool) -> list[dict[str, int]]:
    """The default launch config, then those that `tune` tries. A thread has at most 32 elements of each block."""
    width = triton.next_power_of_2(n_cols)
    found: list[dict[str, int]] = []
    for elements, more in ((2048, 1), (4096, 1), (1024, 1), (2048, 2)):
        tile = max(1, min(elements // width, triton.next_power_of_2(n_rows)))
        warps = more * max(4, min(16 // more, tile * width // 512))
        if backward and width > 4096:  # with 16 some architecture spills
            warps = 8 if element_bytes == 2 else 32
        row = {"BLOCK_ROWS": tile, "BLOCK_COLS": width, "num_warps": warps}
        if row not in found:
            found.append(row)
    return found


@planned
def _plan(
    shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], dtype: torch.dtype, device: torch.device,
    eps: float | None, activation: str, rounds: bool,
) -> Plan | None:  # fmt: skip
    """The launch of a pass, of the backward one without eps; None if the tensors must be copied first."""
    layout = row_strides(shape, *strides)
    if layout is None:
        return None
    rank, n1, n2, rows = layout
    n_rows, n_cols = math.prod(shape[:-1]), shape[-1]
    name = f"gated_rms_norm_{'bwd' if eps is None else 'fwd'}_kernel"
    found = configs(n_rows, n_cols, dtype.itemsize, eps is None)
    block = choose(name, f"{8 * dtype.itemsize}-bit {activation}", found, device)
    tiles = triton.cdiv(n_rows, block["BLOCK_ROWS"])
    constants: dict[str, Any] = {"RANK": rank, "ACTIVATION": activation, "ROUND_FIRST": rounds}
    constants |= {"COMPUTE": compute_dtype(dtype)} | block
    sizes = (n_rows, n_cols) if eps is None else (n_rows, n_cols, eps)
    grid = min(tiles, programs(device)) if eps is None else tiles
    return Plan((grid,), (*sizes, n1, n2, *(s for each in rows for s in each)), constants)


def _empty_fwd(x: Tensor, save_rstd: bool) -> tuple[Tensor, Tensor | None]:
    return empty_like(x), x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype)) if save_rstd else None


def _launch_fwd(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: str, rounds: bool, save_rstd: bool
) -> tuple[Tensor, Tensor | None]:
    y, rstd = _empty_fwd(x, save_rstd)
    if x.numel() == 0:
        return y, rstd
    options = x.dtype, x.device, eps, activation, rounds
    plan = _plan(x.shape, (x.stride(), gate.stride()), *options)
    if plan is None:
        return _launch_fwd(x.contiguous(), gate.contiguous(), weight, eps, activation, rounds, save_rstd)
    launch(gated_rms_norm_fwd_kernel, plan, x, gate, contiguous(weight), y, rstd)
    return y, rstd


def _empty_bwd(
    x: Tensor, weight: Tensor | None, need_dx: bool, need_dgate: bool, need_dw: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dw = weight.new_empty(weight.shape) if need_dw and weight is not None else None
    return empty_like(x) if need_dx else None, empty_like(x) if need_dgate else None, dw


def _launch_bwd(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor | None, rstd: Tensor, activation: str, rounds: bool,
    need_dx: bool, need_dgate: bool, need_dw: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    dx, dgate, dw = _empty_bwd(x, weight, need_dx, need_dgate, need_dw)
    if x.numel() == 0:
        return dx, dgate, dw if dw is None else dw.zero_()
    options = x.dtype, x.device, None, activation, rounds
    plan = _plan(x.shape, (dy.stride(), x.stride(), gate.stride()), *options)
    if plan is None:
        dy, x, gate = dy.contiguous(), x.contiguous(), gate.contiguous()
        return _launch_bwd(dy, x, gate, weight, rstd, activation, rounds, need_dx, need_dgate, need_dw)
    partial = None if dw is None else x.new_empty((plan.grid[0], x.shape[-1]), dtype=wide_dtype(x.dtype))
    launch(
        gated_rms_norm_bwd_kernel, plan,
        dy, x, gate, contiguous(weight), contiguous(rstd), dx, dgate, partial,
    )  # fmt: skip
    if partial is not None and dw is not None:
        sum_partials(partial, dw)
    return dx, dgate, dw


gated_rms_norm = make_backend(
    "triton_",
    define(f"triton_{FWD}", _launch_fwd, _empty_fwd),
    define(f"triton_{BWD}", _launch_bwd, _empty_bwd),
)
