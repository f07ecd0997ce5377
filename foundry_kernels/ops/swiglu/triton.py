"""SwiGLU and GEGLU in Triton.

One kernel forward and one backward serve the three activations. A program takes a block of at most 1024 elements of
some rows; contiguous tensors are one long row. The halves of a packed tensor are views of it, and so are those of its
gradient, which is thereby written packed.

Names: n1, n2 and stride_gate0, stride_gate1, stride_gate2 are what `row_offset` needs to find a row of gate; b_ is a
block of values, o_ offsets.
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
    refuse_second_derivative,
    round_to,
    row_offset,
    row_strides,
)


@triton.jit
def _share(b_g, ACTIVATION: tl.constexpr):
    """activation(g) / g."""
    if ACTIVATION == "silu":
        return 1.0 / (1.0 + tl.exp(-b_g))
    elif ACTIVATION == "gelu":
        return 0.5 + 0.5 * tl.erf(b_g * 0.7071067811865476)
    else:  # (1 + tanh(u)) / 2 is the logistic function of 2u
        return 1.0 / (1.0 + tl.exp(b_g * (b_g * b_g * 0.044715 + 1.0) * -1.5957691216057308))


@triton.jit
def _derivative(b_g, b_share, ACTIVATION: tl.constexpr):
    """The activation's derivative, from `_share`."""
    if ACTIVATION == "silu":
        return b_share * (1.0 + b_g * (1.0 - b_share))
    elif ACTIVATION == "gelu":
        return b_share + b_g * (tl.exp(b_g * b_g * -0.5) * 0.3989422804014327)
    else:
        b_inner = (b_g * b_g * (3 * 0.044715) + 1.0) * 1.5957691216057308
        return b_share + b_g * (b_share * (1.0 - b_share)) * b_inner


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
    b_y = b_g * _share(b_g, ACTIVATION) * b_u
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
    b_share = _share(b_g, ACTIVATION)
    if NEED_DGATE:
        o_up = row_offset(rows, n1, n2, stride_up0, stride_up1, stride_up2, RANK)[:, None] + cols
        b_u = tl.load(up_ptr + o_up, mask=mask, other=0.0).to(COMPUTE)
        b_dgate = b_dy * b_u * _derivative(b_g, b_share, ACTIVATION)
        tl.store(dgate_ptr + o_out, round_to(b_dgate, dgate_ptr.dtype.element_ty), mask=mask)
    if NEED_DUP:
        b_dup = b_dy * (b_g * b_share)
        tl.store(dup_ptr + o_out, round_to(b_dup, dup_ptr.dtype.element_ty), mask=mask)


_BLOCK = 1024  # 8 elements a thread


def _tiles(n_rows: int, n_cols: int) -> tuple[tuple[int], dict[str, int], int]:
    """Grid, block and tiles per row. Narrow rows share a program."""
    cols = min(_BLOCK, triton.next_power_of_2(n_cols))
    rows = min(_BLOCK // cols, triton.next_power_of_2(n_rows))
    n_tiles = triton.cdiv(n_cols, cols)
    grid = (triton.cdiv(n_rows, rows) * n_tiles,)
    return grid, {"BLOCK_ROWS": rows, "BLOCK_COLS": cols, "num_warps": 4}, n_tiles


def _halves(gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The two halves of a packed tensor, or gate and up as they are."""
    if up is not None:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def _layout(out_gap: int, *tensors: Tensor) -> tuple[list[Tensor], tuple[int, int, int, int, int, Any]]:
    """The tensors, copied where strides do not reach their rows, and (rank, n_rows, n_cols, n1, n2, strides).

    Rows that are contiguous in every tensor and, with an `out_gap` of 0, in the output are one long row.
    """
    layout = row_strides(*tensors)
    if layout is None:
        tensors = tuple(t.contiguous() for t in tensors)
        layout = row_strides(*tensors)
    assert layout is not None
    rank, n1, n2, strides = layout
    n_cols = tensors[0].shape[-1]
    n_rows = tensors[0].numel() // n_cols
    if rank == 1 and out_gap == 0 and (n_rows == 1 or all(row_stride == n_cols for *_, row_stride in strides)):
        n_rows, n_cols = 1, n_rows * n_cols
    return list(tensors), (rank, n_rows, n_cols, n1, n2, strides)


def _empty_fwd(gate: Tensor, up: Tensor | None) -> Tensor:
    shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
    return torch.empty(shape, dtype=gate.dtype, device=gate.device)


def _fwd(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    y = _empty_fwd(gate, up)
    if y.numel() == 0:
        return y
    (gate, up), (rank, n_rows, n_cols, n1, n2, (gate_strides, up_strides)) = _layout(0, *_halves(gate, up))
    grid, block, n_tiles = _tiles(n_rows, n_cols)
    glu_fwd_kernel[grid](
        gate, up, y, n_rows, n_cols, n_tiles, n1, n2, *gate_strides, *up_strides,
        RANK=rank, ACTIVATION=activation, COMPUTE=compute_dtype(gate.dtype), **block,
    )  # fmt: skip
    return y


def _empty_bwd(gate: Tensor, up: Tensor | None, need_dgate: bool, need_dup: bool) -> tuple[Tensor, Tensor]:
    dgate, dup = (
        torch.empty(gate.shape if needed else (0,), dtype=gate.dtype, device=gate.device)
        for needed in (need_dgate, need_dup)
    )
    return dgate, dup


def _bwd(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, need_dgate: bool, need_dup: bool
) -> tuple[Tensor, Tensor]:
    dgate, dup = _empty_bwd(gate, up, need_dgate, need_dup)
    if dgate.numel() == 0 and dup.numel() == 0:
        return dgate, dup
    into_gate, into_up = _halves(dgate, None if up is None else dup)
    width = dy.shape[-1]
    out_gap = 0 if up is not None else width
    (dy, gate, up), (rank, n_rows, n_cols, n1, n2, strides) = _layout(out_gap, dy, *_halves(gate, up))
    dy_strides, gate_strides, up_strides = strides
    grid, block, n_tiles = _tiles(n_rows, n_cols)
    glu_bwd_kernel[grid](
        dy, gate, up, into_gate, into_up, width + out_gap, n_rows, n_cols, n_tiles, n1, n2,
        *dy_strides, *gate_strides, *up_strides,
        RANK=rank, ACTIVATION=activation, NEED_DGATE=into_gate.numel() > 0, NEED_DUP=into_up.numel() > 0,
        COMPUTE=compute_dtype(gate.dtype), **block,
    )  # fmt: skip
    return dgate, dup


def _fwd_fake(gate: Tensor, up: Tensor | None, activation: str) -> Tensor:
    return _empty_fwd(gate, up)


def _bwd_fake(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, need_dgate: bool, need_dup: bool
) -> tuple[Tensor, Tensor]:
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
