"""short_conv1d in Triton: launches, operators and the backend's functions."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.devices import capability
from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import define
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous, empty_like, sum_partials
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.short_conv1d.operators import BWD, FWD, STEP, make_backend
from foundry_kernels.ops.short_conv1d.triton.kernels import (
    short_conv1d_bwd_kernel,
    short_conv1d_final_kernel,
    short_conv1d_fwd_kernel,
    short_conv1d_info_kernel,
    short_conv1d_state_bwd_kernel,
    short_conv1d_step_kernel,
)

__all__ = ["short_conv1d", "short_conv1d_step"]

#: Tokens of a chunk of the backward pass. The filter's gradient is summed by chunks, so the GPU must not change it.
_CHUNK = 64


def configs(
    length: int, n_channels: int, bytes_each: int, taps: int, unroll: int, *, backward: bool
) -> list[dict[str, int]]:
    """Returns launch configs: the default, then those that `python -m foundry_kernels tune` tries. By default a thread
    has 16 bytes of a token, in the backward pass 8, for which it also keeps sums; with many taps half as many, so that
    they fit into registers. `unroll` tokens are loaded at a time."""
    most = triton.next_power_of_2(n_channels)
    unrolled = min(unroll, triton.next_power_of_2(length))
    bytes_of_thread = (8 if backward else 16) // (1 if taps <= 4 else 2)
    found: list[dict[str, int]] = []
    for channels, tokens in ((256, 64), (512, 64)) if backward else ((256, 32), (512, 32), (256, 64), (512, 64)):
        warps = max(1, channels * bytes_each // bytes_of_thread // 32)
        row = {"BLOCK_ROWS": tokens, "BLOCK_COLS": min(channels, most), "UNROLL": unrolled, "num_warps": warps}
        if row not in found:
            found.append(row)
    return found


@planned
def _plan(
    kernel: str,
    shape: tuple[int, int, int],
    strides: tuple[int, ...],
    taps: int,
    silu: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> Plan:
    """The plan of a kernel over chunks of tokens."""
    batch, length, n_channels = shape
    # ptxas spills registers for 8.0 if the backward pass loads 8 tokens of 16 bits at a time, for 9.0 if it loads 4.
    unroll = 4 if "bwd" in kernel and dtype.itemsize == 2 and capability(device) < 90 else 8
    block = choose(
        kernel,
        f"{8 * dtype.itemsize}-bit, {taps} taps",
        configs(length, n_channels, dtype.itemsize, taps, unroll, backward="bwd" in kernel),
        device,
    )
    n_tiles = triton.cdiv(n_channels, block["BLOCK_COLS"])
    constants = {"W": taps, "SILU": silu, "COMPUTE": compute_dtype(dtype), **block}
    n_chunks = triton.cdiv(length, block["BLOCK_ROWS"])
    return Plan((batch * n_chunks * n_tiles,), (n_channels, n_tiles, n_chunks, length, *strides), constants)


@planned
def _plan_documents(
    documents: int,
    shape: tuple[int, int, int],
    strides: tuple[int, ...],
    taps: int,
    more: tuple[tuple[str, object], ...],
) -> Plan:
    """The plan of a kernel over documents."""
    _, length, n_channels = shape
    cols = min(512, triton.next_power_of_2(n_channels))
    n_tiles = triton.cdiv(n_channels, cols)
    constants = {"W": taps, "BLOCK_COLS": cols, "num_warps": 4, **dict(more)}
    return Plan((documents * n_tiles,), (n_channels, n_tiles, length, *strides), constants)


@planned
def _plan_info(documents: int, length: int) -> Plan:
    block = min(256, triton.next_power_of_2(length))
    steps = documents.bit_length()
    return Plan((triton.cdiv(length, block),), (documents, length, steps), {"BLOCK": block, "num_warps": 4})


def _info(cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
    """The document of each token, its first token and its end."""
    if cu_seqlens is None:
        return None
    info = torch.empty((3, x.shape[1]), dtype=torch.int32, device=x.device)
    launch(short_conv1d_info_kernel, _plan_info(cu_seqlens.shape[0] - 1, x.shape[1]), cu_seqlens, info)
    return info


def _with_channels(x: Tensor) -> Tensor:
    """x [B, T, C] with channels next to each other."""
    return x if x.stride(2) == 1 or x.shape[2] <= 1 else x.contiguous()


def _empty_fwd(x: Tensor, weight: Tensor, cu_seqlens: Tensor | None, need_state: bool) -> tuple[Tensor, Tensor | None]:
    documents = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final_state = x.new_empty(documents, x.shape[2], weight.shape[1] - 1) if need_state else None
    return empty_like(x), final_state


def _fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, cu_seqlens: Tensor | None,
    initial_state: Tensor | None, residual: Tensor | None, need_state: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    y, final_state = _empty_fwd(x, weight, cu_seqlens, need_state)
    x, cu_seqlens, taps = _with_channels(x), contiguous(cu_seqlens), weight.shape[1]
    state = contiguous(initial_state) if taps > 1 else None
    strides = x.stride()[:2]
    if y.numel():
        options = taps, activation == "silu", x.dtype, x.device
        added = None if residual is None else _with_channels(residual)
        of_added = (0, 0) if added is None else added.stride()[:2]
        plan = _plan("short_conv1d_fwd_kernel", x.shape, (*strides, *of_added), *options)
        tensors = x, weight.contiguous(), contiguous(bias), _info(cu_seqlens, x), state, added, y
        launch(short_conv1d_fwd_kernel, plan, *tensors)
    if final_state is not None and final_state.numel():
        plan = _plan_documents(final_state.shape[0], x.shape, strides, taps, ())
        launch(short_conv1d_final_kernel, plan, x, cu_seqlens, state, final_state)
    return y, final_state


def _empty_bwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, initial_state: Tensor | None, need_dx: bool, need_dweight: bool,
    need_dbias: bool, need_dinitial_state: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    given = (x, need_dx), (weight, need_dweight), (bias, need_dbias), (initial_state, need_dinitial_state)
    dx, dweight, dbias, dinitial_state = (empty_like(t) if needed and t is not None else None for t, needed in given)
    return dx, dweight, dbias, dinitial_state


def _bwd(
    dy: Tensor, dfinal_state: Tensor | None, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str,
    cu_seqlens: Tensor | None, initial_state: Tensor | None, need_dx: bool, need_dweight: bool, need_dbias: bool,
    need_dinitial_state: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    needed = need_dx, need_dweight, need_dbias, need_dinitial_state
    dx, dweight, dbias, dinitial_state = results = _empty_bwd(x, weight, bias, initial_state, *needed)
    x, dy, cu_seqlens, taps = _with_channels(x), _with_channels(dy), contiguous(cu_seqlens), weight.shape[1]
    silu, strides = activation == "silu", (*x.stride()[:2], *dy.stride()[:2])
    state, dstate = (contiguous(t) if taps > 1 else None for t in (initial_state, dfinal_state))
    filters = weight.contiguous(), contiguous(bias)
    if x.numel() == 0:
        for gradient in (dweight, dbias):
            if gradient is not None:
                gradient.zero_()
    elif dx is not None or dweight is not None or dbias is not None:
        plan = _plan("short_conv1d_bwd_kernel", x.shape, strides, taps, silu, x.dtype, x.device)
        chunks, wide = x.shape[0] * triton.cdiv(x.shape[1], _CHUNK), wide_dtype(x.dtype)
        partials = [
            None if t is None else torch.empty((chunks, math.prod(t.shape)), dtype=wide, device=x.device)
            for t in (dweight, dbias)
        ]
        launch(
            short_conv1d_bwd_kernel, plan, dy, dstate, x, *filters, _info(cu_seqlens, x), state, dx, *partials
        )  # fmt: skip
        for partial, gradient in zip(partials, (dweight, dbias), strict=True):
            if partial is not None and gradient is not None:
                sum_partials(partial, gradient)
    if dinitial_state is not None and dinitial_state.numel():
        more = (("SILU", silu), ("COMPUTE", compute_dtype(x.dtype)))
        plan = _plan_documents(dinitial_state.shape[0], x.shape, strides, taps, more)
        launch(short_conv1d_state_bwd_kernel, plan, dy, dstate, x, *filters, cu_seqlens, state, dinitial_state)
    return results


@planned
def _plan_step(
    shape: tuple[int, int], stride_x: int, state_strides: tuple[int, int, int], taps: int, length: int, silu: bool,
    dtype: torch.dtype, stride_residual: int,
) -> Plan:  # fmt: skip
    n_rows, n_channels = shape
    cols = min(256, triton.next_power_of_2(n_channels))
    n_tiles = triton.cdiv(n_channels, cols)
    constants = {"W": taps, "S": length, "SILU": silu, "COMPUTE": compute_dtype(dtype), "BLOCK_COLS": cols}
    numbers = n_channels, n_tiles, stride_x, *state_strides, stride_residual
    return Plan((n_rows * n_tiles,), numbers, {**constants, "num_warps": 4})


def _rows(x: Tensor) -> Tensor:
    """x [B, C] with channels next to each other."""
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    y = empty_like(x)
    if y.numel() == 0:
        return y
    x, residual = _rows(x), None if residual is None else _rows(residual)
    options = weight.shape[1], state.shape[2], activation == "silu", x.dtype
    plan = _plan_step(x.shape, x.stride(0), state.stride(), *options, 0 if residual is None else residual.stride(0))
    launch(short_conv1d_step_kernel, plan, x, weight.contiguous(), contiguous(bias), state, residual, y)
    return y


short_conv1d = make_backend(
    "triton_", define(f"triton_{FWD}", _fwd, _empty_fwd), define(f"triton_{BWD}", _bwd, _empty_bwd)
)
short_conv1d_step = define(f"triton_{STEP}", _step, empty_like)
