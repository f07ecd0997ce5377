"""Gated linear units in Triton: launchers, operators and autograd of the kernels in `kernels`."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import apply, define, requires_grad
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous, empty_like, row_strides, strides_of
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.dropout import kernel_numbers
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.swiglu.options import GatedOptions
from foundry_kernels.ops.swiglu.triton.kernels import glu_bwd_kernel, glu_fwd_kernel

_BLOCK = 1024  # 8 elements a thread


def configs(n_rows: int, n_cols: int) -> list[dict[str, int]]:
    """Blocks and warps: the default of `_BLOCK` elements, then the candidates of `python -m foundry_kernels tune`.
    Narrow rows share a program."""
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
    kernel: str, n_rows: int, n_cols: int, dtype: torch.dtype, activation: str, device: torch.device, dropout: bool
) -> tuple[tuple[int], dict[str, int], int]:
    """Grid, block and tiles per row."""
    found = configs(n_rows, n_cols)
    if dropout:  # not tuned; a counter of the generator covers four columns
        block = found[0] | {"BLOCK_COLS": max(4, found[0]["BLOCK_COLS"])}
    else:
        block = choose(kernel, f"{8 * dtype.itemsize}-bit {activation}", found, device)
    n_tiles = triton.cdiv(n_cols, block["BLOCK_COLS"])
    grid = (triton.cdiv(n_rows, block["BLOCK_ROWS"]) * n_tiles,)
    return grid, block, n_tiles


PLAIN = GatedOptions()


def _constants(options: GatedOptions) -> dict[str, Any]:
    """Returns the kernels' constants. An option that is off always has the same constant, whatever its value."""
    return {
        "ALPHA": float(options.alpha),
        "LIMIT": None if options.limit is None else float(options.limit),
        "UP_OFFSET": float(options.up_offset),
        "INTERLEAVED": options.interleaved,
        "DROPOUT": options.dropout_p != 0.0,
    }


def _numbers(options: GatedOptions) -> tuple[int | None, float | None]:
    return kernel_numbers(options.dropout_p or None)


def _of_plan(options: GatedOptions) -> GatedOptions:
    """The options that plans depend on: dropout_p is 0 without a seed."""
    if options.dropout_seed is None:
        return options if options.dropout_p == 0.0 else options._replace(dropout_p=0.0)
    return options.without_tensors()


def _halves(gate: Tensor, up: Tensor | None, interleaved: bool = False) -> tuple[Tensor, Tensor | None]:
    """The two halves of a packed tensor, or gate and up themselves. An interleaved tensor stays whole."""
    if up is not None or interleaved:
        return gate, up
    half = gate.shape[-1] // 2
    return gate[..., :half], gate[..., half:]


def _layout(
    shape: tuple[int, ...], joins: bool, *strides: tuple[int, ...] | None, pairs: int = -1
) -> tuple[int, int, int, int, int, list[int]] | None:
    """(rank, n_rows, n_cols, n1, n2, strides) of tensors of this shape; None if they must be copied first.

    With `joins`, rows that are contiguous in every tensor become one long row. `pairs` is the index of a tensor whose
    rows are twice as wide. None in `strides` is an absent tensor.
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
    if rank == 1 and joins and (n_rows == 1 or steps == widths):
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
    joins, pairs = options.dropout_p == 0.0, 0 if options.interleaved else -1
    layout = _layout(shape, joins, gate_strides, up_strides, pairs=pairs)
    if layout is None:
        return None
    rank, n_rows, n_cols, n1, n2, strides = layout
    grid, block, n_tiles = _tiles("glu_fwd_kernel", n_rows, n_cols, dtype, activation, device, not joins)
    constants = {"RANK": rank, "ACTIVATION": activation, "COMPUTE": compute_dtype(dtype)} | _constants(options)
    return Plan(grid, (n_rows, n_cols, n_tiles, n1, n2, *strides, *_numbers(options)), constants | block)


def _fwd(gate: Tensor, up: Tensor | None, activation: str, options: GatedOptions) -> Tensor:
    y = _empty_fwd(gate, up)
    if y.numel() == 0:
        return y
    gate, up = _halves(gate, up, options.interleaved)
    wanted = gate.dtype, gate.device, activation, _of_plan(options)
    plan = _plan_fwd(y.shape, gate.stride(), strides_of(up), *wanted)
    if plan is None:
        return _fwd(gate.contiguous(), contiguous(up), activation, options)
    launch(glu_fwd_kernel, plan, gate, up, y, options.dropout_seed)
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
    dropout, pairs = options.dropout_p != 0.0, 1 if options.interleaved else -1
    joins = (options.interleaved or not packed) and not dropout
    layout = _layout(shape, joins, dy_strides, gate_strides, up_strides, pairs=pairs)
    if layout is None:
        return None
    rank, n_rows, n_cols, n1, n2, strides = layout
    grid, block, n_tiles = _tiles("glu_bwd_kernel", n_rows, n_cols, dtype, activation, device, dropout)
    constants = {"RANK": rank, "ACTIVATION": activation, "COMPUTE": compute_dtype(dtype)} | _constants(options)
    needed = {"NEED_DGATE": need_dgate, "NEED_DUP": need_dup}
    numbers = out_width, n_rows, n_cols, n_tiles, n1, n2, *strides, *_numbers(options)
    return Plan(grid, numbers, constants | needed | block)


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
    needed = into_gate is not None, into_up is not None
    wanted = gate.dtype, gate.device, packed, activation, *needed, _of_plan(options)
    plan = _plan_bwd(dy.shape, dy.stride(), gate.stride(), strides_of(up), *wanted)
    if plan is None:
        dy, gate, up = dy.contiguous(), gate.contiguous(), contiguous(up)
        plan = _plan_bwd(dy.shape, dy.stride(), gate.stride(), strides_of(up), *wanted)
        assert plan is not None
    launch(glu_bwd_kernel, plan, dy, gate, up, into_gate, into_up, options.dropout_seed)
    return dgate, dup


_glu_fwd = define(
    f"triton_glu_fwd(Tensor gate, Tensor? up, str activation, {GatedOptions.SCHEMA}) -> Tensor",
    _fwd,
    _empty_fwd,
    GatedOptions,
)
_glu_bwd = define(
    "triton_glu_bwd(Tensor dy, Tensor gate, Tensor? up, str activation, bool need_dgate, bool need_dup, "
    f"{GatedOptions.SCHEMA}) -> (Tensor dgate, Tensor dup)",
    _bwd,
    _empty_bwd,
    GatedOptions,
)


#: The public function of an activation.
_NAMES = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu", "sigmoid": "glu", "relu": "reglu"}


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor | None, activation: str, options: GatedOptions) -> Tensor:
        ctx.save_for_backward(gate, up, options.dropout_seed)
        ctx.activation, ctx.options = activation, options.without_tensors()
        return _glu_fwd(gate, up, activation, options)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_derivative(_NAMES[ctx.activation])
        gate, up, seed = ctx.saved_tensors
        need_dgate, need_dup, *_ = ctx.needs_input_grad
        options = ctx.options.with_tensors((seed,))
        dgate, dup = _glu_bwd(dy, gate, up, ctx.activation, need_dgate, need_dup, options)
        return dgate if need_dgate else None, dup if need_dup else None, None, None


def _glu(gate: Tensor, up: Tensor | None, activation: str, options: GatedOptions) -> Tensor:
    if requires_grad(gate, up):
        return apply(_GLU, gate, up, activation, options)
    return _glu_fwd(gate, up, activation, options)


def _only(dropout_options: tuple[Any, ...]) -> GatedOptions:
    if not dropout_options:
        return PLAIN
    dropout_p, dropout_seed = dropout_options
    return PLAIN._replace(dropout_p=dropout_p, dropout_seed=dropout_seed)


def swiglu(gate: Tensor, up: Tensor | None, *options: Any) -> Tensor:
    """`options` are those of the public function, in its order."""
    return _glu(gate, up, "silu", GatedOptions(*options) if options else PLAIN)


def geglu(gate: Tensor, up: Tensor | None, approximate: str, *dropout_options: Any) -> Tensor:
    return _glu(gate, up, "gelu" if approximate == "none" else "gelu_tanh", _only(dropout_options))


def glu(gate: Tensor, up: Tensor | None, *dropout_options: Any) -> Tensor:
    return _glu(gate, up, "sigmoid", _only(dropout_options))


def reglu(gate: Tensor, up: Tensor | None, *dropout_options: Any) -> Tensor:
    return _glu(gate, up, "relu", _only(dropout_options))
