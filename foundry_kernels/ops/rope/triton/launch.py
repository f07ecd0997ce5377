"""The launches of the kernels: tiles, strides, and which of q and k are computed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foundry_kernels._triton import VERSION
from foundry_kernels._triton.devices import programs
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, strides_of, sum_partials
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.layout import storage_order
from foundry_kernels.ops.rms_norm.options import PLAIN_WEIGHT, WeightOptions
from foundry_kernels.ops.rope.options import RopeOptions
from foundry_kernels.ops.rope.triton.kernels import qk_norm_rope_bwd_kernel, rope_kernel


def config(
    head_dim: int,
    rotary_dim: int,
    tokens: int,
    n_heads: int,
    n_kv_heads: int,
    *,
    heads_inner: bool,
    aligned: bool,
    backward: bool,
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Tile and warps for heads of `head_dim`, whose first `rotary_dim` dimensions are rotated: 8 pairs for each thread,
    and 4 warps in the forward pass and 8 in the backward pass if there is enough work.

    A tile covers adjacent memory: the heads of a token (`heads_inner`) or the tokens of a head. Its number of heads is
    a power of two that divides both numbers of heads, so that no lane is idle, unless there are too few tokens to fill
    it otherwise.

    The limits come from compiling for compute capabilities 8.0 to 12.0. Rows that are not `aligned` to 16 elements need
    more address arithmetic, so backward tiles have half the rows. 128 registers leave room for two programs. Heads that
    are narrow, partly rotated, smaller than their block or, in the backward pass, wide need more than that. With 128,
    Triton before 3.7 would spill 8 bytes in float32, so its tiles have half the rows. `maxnreg` is the maximum for the
    warps. Without it, ptxas spills some registers for an occupancy that it guesses, or uses so many that one program
    fits instead of two.
    """
    block = triton.next_power_of_2((head_dim + 1) // 2)
    fits_128_registers = (
        aligned and rotary_dim == head_dim == 2 * block and 64 <= head_dim <= (128 if backward else 256)
    )
    registers = 128 if fits_128_registers else 255
    would_spill = VERSION < (3, 7) and dtype == torch.float32 and fits_128_registers
    half = backward and (not aligned or would_spill)
    pairs = 1024 if half or not backward else 2048
    rows = max(1, min(128, pairs // block))
    block_heads = 1
    if heads_inner:
        common = math.gcd(n_heads, n_kv_heads)
        block_heads = min(rows, common & -common)
    block_tokens = min(rows // block_heads, triton.next_power_of_2(tokens))
    block_heads = min(rows // block_tokens, triton.next_power_of_2(max(n_heads, n_kv_heads)))
    warps = max(1, min(32, block_tokens * block_heads * block // (128 if half else 256)))
    return {
        "BLOCK_TOKENS": block_tokens,
        "BLOCK_HEADS": block_heads,
        "BLOCK": block,
        "num_warps": warps,
        "maxnreg": min(registers, 65536 // (32 * warps)),
    }


def configs(own: dict[str, Any], aligned: bool) -> list[dict[str, Any]]:
    """Returns `own`, a result of `config`, then the configs that `python -m foundry_kernels tune` tries: other warps,
    tiles and numbers of registers. Unaligned launches have no alternatives, because their register use has not been
    checked."""
    found = [own]
    tokens, warps = own["BLOCK_TOKENS"], own["num_warps"]
    for n, w in ((tokens, 2 * warps), (tokens, warps // 2), (2 * tokens, 2 * warps), (tokens // 2, warps // 2)):
        for registers in (128, 255):
            row = own | {"BLOCK_TOKENS": n, "num_warps": w, "maxnreg": min(registers, 65536 // max(1, 32 * w))}
            if aligned and n >= 1 and 1 <= w <= 32 and row not in found:
                found.append(row)
    return found


Layout = tuple[tuple[int, ...], tuple[int, ...]]  # shape and strides


class Norms(NamedTuple):
    """The inputs of a forward pass with norms besides q, k and the tables. If rstd is None, it is not saved."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    eps: float
    options: WeightOptions


NO_NORMS = Norms(None, None, None, None, 0.0, PLAIN_WEIGHT)


def with_unit_stride(x: Tensor) -> Tensor:
    """x with a last stride of 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def unit_stride(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def launch_forward(
    q: Tensor | None,
    k: Tensor | None,
    q_out: Tensor | None,
    k_out: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    options: RopeOptions,
    *,
    inverse: bool = False,
    norms: Norms = NO_NORMS,
) -> None:
    """Rotates q and k, if given, into q_out and k_out. These are dense tensors; their memory order is the order of the
    work."""
    if not (_has_elements(q) or _has_elements(k)):
        return
    x = q if q is not None else k
    assert x is not None
    cos, sin = with_unit_stride(cos), with_unit_stride(sin)
    interleaved, positions = options
    check_positions(positions, cos)
    q, k = unit_stride(q), unit_stride(k)
    plan = _plan_forward(
        _layout(q), _layout(k), strides_of(q_out), strides_of(k_out), layout(cos), layout(sin), _layout(positions),
        x.dtype, x.device, interleaved, -1.0 if inverse else 1.0, norms is not NO_NORMS, *norms[4:],
    )  # fmt: skip
    q_weight, k_weight, q_rstd, k_rstd = norms[:4]
    launch(rope_kernel, plan, q, k, q_weight, k_weight, q_out, k_out, q_rstd, k_rstd, cos, sin, positions)


@planned
def _plan_forward(
    q: Layout | None,
    k: Layout | None,
    q_out: tuple[int, ...] | None,
    k_out: tuple[int, ...] | None,
    cos: Layout,
    sin: Layout,
    positions: Layout | None,
    dtype: torch.dtype,
    device: torch.device,
    interleaved: bool,
    direction: float,
    norm: bool,
    eps: float,
    weight_options: WeightOptions,
) -> Plan:
    on_q = q is not None and 0 not in q[0]
    x, out = (q, q_out) if on_q else (k, k_out)
    assert x is not None
    assert out is not None
    strides = [*_strides(q and q[1], k and k[1], q_out, k_out), *_table_strides(cos), *_table_strides(sin)]
    kernel = "rope_kernel", "with norms" if norm else "without norms", device
    options = _config(kernel, x[0], q, k, cos, strides, dtype, heads_inner=out[1] < out[2], backward=False)
    chunks = sum(triton.cdiv(_n_heads(t), options["BLOCK_HEADS"]) for t in (q, k))
    splits, items = _split(options, x[0], device, chunks)
    numbers = (
        x[0][2], _n_heads(q), _n_heads(k), cos[0][-2], splits, *strides, *_position_strides(positions),
        direction, eps, weight_options.weight_offset,
    )  # fmt: skip
    constants = {"NORM": norm, "ROUND_FIRST": weight_options.round_before_weight, "INTERLEAVED": interleaved}
    return Plan((items,), numbers, constants | {"D": x[0][3], "HALF": cos[0][-1]} | options)


def launch_backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor | None,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor | None,
    k_rstd: Tensor | None,
    weight_options: WeightOptions,
    options: RopeOptions,
    dq: Tensor | None,
    dk: Tensor | None,
    dq_weight: Tensor | None,
    dk_weight: Tensor | None,
) -> None:
    """Fills the gradients that are given. At least one of q and k has elements."""
    x = q if _has_elements(q) else k
    assert x is not None
    order = storage_order(x)
    cos, sin = with_unit_stride(cos), with_unit_stride(sin)
    interleaved, positions = options
    check_positions(positions, cos)
    dq_out, dk_out, q, k = unit_stride(dq_out), unit_stride(dk_out), unit_stride(q), unit_stride(k)
    plan = _plan_backward(
        strides_of(dq_out), strides_of(dk_out), _layout(q), _layout(k), strides_of(dq), strides_of(dk),
        layout(cos), layout(sin), _layout(positions), x.dtype, x.device, order.index(1) > order.index(2),
        interleaved, weight_options,
    )  # fmt: skip
    q_partial, k_partial = _partial(dq_weight, x, plan.grid[0]), _partial(dk_weight, x, plan.grid[0])
    launch(
        qk_norm_rope_bwd_kernel, plan, dq_out, dk_out, q, k, unit_stride(q_weight), unit_stride(k_weight),
        q_rstd, k_rstd, cos, sin, positions, dq, dk, q_partial, k_partial,
    )  # fmt: skip
    for partial, dw in ((q_partial, dq_weight), (k_partial, dk_weight)):
        if partial is not None and dw is not None:
            sum_partials(partial, dw)


@planned
def _plan_backward(
    dq_out: tuple[int, ...] | None,
    dk_out: tuple[int, ...] | None,
    q: Layout | None,
    k: Layout | None,
    dq: tuple[int, ...] | None,
    dk: tuple[int, ...] | None,
    cos: Layout,
    sin: Layout,
    positions: Layout | None,
    dtype: torch.dtype,
    device: torch.device,
    heads_inner: bool,
    interleaved: bool,
    weight_options: WeightOptions,
) -> Plan:
    x = q if q is not None and 0 not in q[0] else k
    assert x is not None
    strides = [*_strides(dq_out, dk_out, q and q[1], k and k[1], dq, dk), *_table_strides(cos), *_table_strides(sin)]
    kernel = "qk_norm_rope_bwd_kernel", "with norms", device
    options = _config(kernel, x[0], q, k, cos, strides, dtype, heads_inner=heads_inner, backward=True)
    q_splits, q_items = _split(options, x[0], device, triton.cdiv(_n_heads(q), options["BLOCK_HEADS"]))
    k_splits, k_items = _split(options, x[0], device, triton.cdiv(_n_heads(k), options["BLOCK_HEADS"]))
    grid = min(max(q_items, k_items), programs(device))
    numbers = (
        x[0][2], _n_heads(q), _n_heads(k), cos[0][-2], q_items, k_items, q_splits, k_splits,
        *strides, *_position_strides(positions), weight_options.weight_offset,
    )  # fmt: skip
    constants = {"INTERLEAVED": interleaved, "ROUND_FIRST": weight_options.round_before_weight}
    return Plan((grid,), numbers, constants | {"D": x[0][3], "HALF": cos[0][-1]} | options)


def check_positions(positions: Tensor | None, cos: Tensor) -> None:
    """Checks positions on the CPU; on a GPU the check would have to synchronize."""
    if positions is not None and positions.device.type == "cpu" and positions.numel() > 0:
        low, high = (int(x) for x in positions.aminmax())
        if low < 0 or high >= cos.shape[-2]:
            raise IndexError(f"positions must lie in 0 .. {cos.shape[-2] - 1}, the table's rows; got {low} to {high}")


def layout(x: Tensor) -> Layout:
    return x.shape, x.stride()


def _layout(x: Tensor | None) -> Layout | None:
    return None if x is None else (x.shape, x.stride())


def _table_strides(table: Layout) -> tuple[int, int]:
    """The strides over batch and rows (or tokens)."""
    _, strides = table
    return strides[0] if len(strides) == 3 else 0, strides[-2]


def _position_strides(positions: Layout | None) -> tuple[int, int]:
    if positions is None:
        return 0, 0
    _, strides = positions
    return strides[0] if len(strides) == 2 else 0, strides[-1]


def _config(
    kernel: tuple[str, str, torch.device],
    shape: tuple[int, ...],
    q: Layout | None,
    k: Layout | None,
    cos: Layout,
    strides: list[int],
    dtype: torch.dtype,
    *,
    heads_inner: bool,
    backward: bool,
) -> dict[str, Any]:
    aligned = all(s % 16 == 0 for s in strides)
    own = config(
        shape[3], 2 * cos[0][-1], shape[2], _n_heads(q), _n_heads(k),
        heads_inner=heads_inner, aligned=aligned, backward=backward, dtype=dtype,
    )  # fmt: skip
    name, norms, device = kernel
    tags = f"{8 * dtype.itemsize}-bit D={shape[3]} of which {2 * cos[0][-1]} rotated, {norms}"
    options = choose(name, tags, configs(own, aligned), device)
    return options | {"COMPUTE": compute_dtype(dtype)}


def _split(options: dict[str, Any], shape: tuple[int, ...], device: torch.device, chunks: int) -> tuple[int, int]:
    """The number of programs that share the `chunks` of heads of a tile of tokens, and the resulting number of work
    items. A program has about 4 chunks, which share the angles that it loads, or fewer if the device would not be
    full."""
    tiles = shape[0] * triton.cdiv(shape[2], options["BLOCK_TOKENS"])
    splits = min(chunks, max(triton.cdiv(chunks, 4), triton.cdiv(4 * programs(device), tiles)))
    return splits, tiles * splits


def _partial(dw: Tensor | None, x: Tensor, grid: int) -> Tensor | None:
    """A row for each program's part of a weight's gradient."""
    if dw is None:
        return None
    accumulate = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty((grid, x.shape[3]), dtype=accumulate, device=x.device)


def _strides(*tensors: tuple[int, ...] | None) -> list[int]:
    """Returns each tensor's strides over batch, heads and tokens."""
    return [s for strides in tensors for s in (strides or (0, 0, 0))[:3]]


def _n_heads(x: Layout | None) -> int:
    return 0 if x is None else x[0][1]


def _has_elements(x: Tensor | None) -> bool:
    return x is not None and x.numel() > 0
