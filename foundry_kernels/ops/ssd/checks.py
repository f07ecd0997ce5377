"""The checks of the public functions, before any kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_documents,
    check_dtype,
    check_float,
    check_int,
    check_number,
    check_rank,
    check_shape,
    constants,
)
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_delta_rule.checks import CHUNK_SIZES, MAX_HEAD_DIM, MAX_VALUE_DIM
from foundry_kernels.ops.ssd.options import SsdOptions


def check_sequence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    initial_states: Tensor | None,
    return_final_states: bool,
    cu_seqlens: Tensor | None,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, SsdOptions]:
    """Returns x, B, C and z, cast where autocast is enabled, and the options."""
    x, B, C, z, limits = _check_token(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, "T, ")
    check_bool("return_final_states", return_final_states)
    if chunk_size is not None:
        check_int("chunk_size", chunk_size)
        if chunk_size not in CHUNK_SIZES:
            raise ValueError(f"chunk_size must be None or one of {', '.join(map(str, CHUNK_SIZES))}; got {chunk_size}")
    n_states = x.shape[0]
    if cu_seqlens is not None:
        if n_states != 1:
            raise ValueError(f"x must have a batch of 1 with cu_seqlens; got {n_states}")
        n_states = check_documents(cu_seqlens, "x", x, x.shape[1])
    if initial_states is not None:
        _check_state("initial_states", initial_states, x, B, n_states, "B" if cu_seqlens is None else "n")
    options = SsdOptions(cu_seqlens, dt_softplus, *limits, chunk_size, return_final_states)
    return x, B, C, z, options


def check_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[float, float]]:
    """Returns x, B, C and z, cast where autocast is enabled, and the limits of dt."""
    check_float("x", x)
    check_float("state", state)
    check_device("x", x, "state", state)
    x, B, C, z, limits = _check_token(x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, "")
    _check_state("state", state, x, B, x.shape[0], "B")
    if not (is_dense(state) or is_dense(state.mT)):
        raise ValueError(f"state must be dense in its last two dimensions; got strides {state.stride()}")
    return x, B, C, z, limits


def is_dense(state: Tensor) -> bool:
    """Whether the last two dimensions of `state` are contiguous, and no head shares the memory of another one."""
    rows, columns = state.stride()[2:]
    dense = (columns == 1 or state.shape[3] == 1) and (rows == state.shape[3] or state.shape[2] == 1)
    return dense and all(stride or size <= 1 for size, stride in zip(state.shape[:2], state.stride()[:2], strict=True))


def _check_token(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_limit: tuple[float, float],
    tokens: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, tuple[float, float]]:
    """tokens: the layout's part between the batch and the heads."""
    given = {"x": x, "B": B, "C": C} | ({} if z is None else {"z": z})
    for name, each in given.items():
        check_float(name, each)
    if (low := autocast_dtype(x)) is not None:
        given = {name: each if each.dtype == torch.float64 else each.to(low) for name, each in given.items()}
    x, B, C, z = given["x"], given["B"], given["C"], given.get("z")
    for name, each in given.items():
        check_dtype(name, each, "x", x)
        check_device(name, each, "x", x)
    rank = 4 if tokens else 3
    check_rank("x", x, rank, f"[B, {tokens}H, P]")
    check_rank("B", B, rank, f"[B, {tokens}G, N]")
    if B.shape[:-2] != x.shape[:-2]:
        raise ValueError(f"B must be [B, {tokens}G, N] with x's {tuple(x.shape)}; got shape {tuple(B.shape)}")
    check_shape("C", C, B.shape, "B's")
    if z is not None:
        check_shape("z", z, x.shape, "x's")
    groups, heads = B.shape[-2], x.shape[-2]
    if groups == 0 or heads % groups != 0:
        raise ValueError(f"x must have a multiple of B's {groups} groups as heads; got {heads}")
    for name, each, most in (("x", x, MAX_VALUE_DIM), ("B", B, MAX_HEAD_DIM)):
        if not 1 <= each.shape[-1] <= most:
            raise ValueError(f"{name} must have a last dimension of 1 to {most}; got {each.shape[-1]}")
    _check_numbers("dt", dt, x, x.shape[:-1], f"[B, {tokens}H]")
    _check_numbers("A", A, x, x.shape[-2:-1], "[H]")
    if D is not None:
        wide = isinstance(D, Tensor) and D.dim() == 2
        _check_numbers("D", D, x, x.shape[-2:] if wide else x.shape[-2:-1], "[H, P]" if wide else "[H] or [H, P]")
    if dt_bias is not None:
        _check_numbers("dt_bias", dt_bias, x, x.shape[-2:-1], "[H]")
    check_bool("dt_softplus", dt_softplus)
    return x, B, C, z, check_limits("dt_limit", dt_limit)


def check_limits(name: str, limits: tuple[float | None, float | None]) -> tuple[float, float]:
    """Returns the least and the largest step size. None is no limit."""
    if not isinstance(limits, (tuple, list)) or len(limits) != 2:
        raise TypeError(f"{name} must be two numbers; got {limits!r}")
    ends = (-float("inf"), float("inf"))
    least, most = constants(*(end if limit is None else limit for limit, end in zip(limits, ends, strict=True)))
    for value in (least, most):
        check_number(name, 0.0 if value in (float("inf"), -float("inf")) else value)
    if not least <= most:
        raise ValueError(f"{name} must rise; got {tuple(limits)}")
    return float(least), float(most)


def _check_numbers(name: str, given: Tensor, x: Tensor, shape: tuple[int, ...], layout: str) -> None:
    check_float(name, given)
    check_shape(name, given, shape, f"{layout} with x's {tuple(x.shape)}")
    check_device(name, given, "x", x)
    if given.dtype not in (x.dtype, wide_dtype(x.dtype)):
        raise TypeError(f"{name} must be {wide_dtype(x.dtype)} or x's {x.dtype}; got {given.dtype}")


def _check_state(name: str, state: Tensor, x: Tensor, B: Tensor, n: int, which: str) -> None:
    check_float(name, state)
    check_shape(name, state, (n, x.shape[-2], x.shape[-1], B.shape[-1]), f"[{which}, H, P, N]")
    check_device(name, state, "x", x)
    if state.dtype != wide_dtype(x.dtype):
        raise TypeError(f"{name} must be {wide_dtype(x.dtype)} beside x of {x.dtype}; got {state.dtype}")
