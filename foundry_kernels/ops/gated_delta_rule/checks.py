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
    check_positive,
    check_rank,
    check_shape,
    check_tensor,
    constants,
)
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_delta_rule.options import DeltaRuleOptions

MAX_HEAD_DIM = 256
#: Two parts of columns; see `columns`.
MAX_VALUE_DIM = 2 * MAX_HEAD_DIM
CHUNK_SIZES = (16, 32, 64, 128)


def check_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    scale: float | None,
    return_final_state: bool,
    cu_seqlens: Tensor | None,
    qk_l2norm: bool,
    chunk_size: int | None,
    delta: bool,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    beta_limit: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, DeltaRuleOptions]:
    """Returns q, k and v, cast where autocast is enabled, and the options."""
    q, k, v = _check_vectors(q, k, v, "T, ")
    _check_decay(g, k, v, "[B, H_v, T", 4)
    _check_numbers("beta", beta, v, "[B, H_v, T]")
    beta_limit = _check_gates(g, beta, v, 4, A_log, dt_bias, beta_limit)
    check_bool("return_final_state", return_final_state)
    check_bool("qk_l2norm", qk_l2norm)
    if chunk_size is not None:
        check_int("chunk_size", chunk_size)
        if chunk_size not in CHUNK_SIZES:
            raise ValueError(f"chunk_size must be None or one of {', '.join(map(str, CHUNK_SIZES))}; got {chunk_size}")
    n_states = v.shape[0]
    if cu_seqlens is not None:
        if n_states != 1:
            raise ValueError(f"q, k and v must have a batch of 1 with cu_seqlens; got {n_states}")
        n_states = check_documents(cu_seqlens, "q", v, v.shape[2])
    if initial_state is not None:
        _check_state("initial_state", initial_state, k, v, n_states, "B" if cu_seqlens is None else "N")
    options = DeltaRuleOptions(
        cu_seqlens, _scale(scale, q), qk_l2norm, delta, chunk_size, beta_limit, return_final_state
    )
    return q, k, v, options


def check_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    scale: float | None,
    qk_l2norm: bool,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    beta_limit: float | None,
) -> tuple[Tensor, Tensor, Tensor, float, float | None]:
    """Returns q, k and v, cast where autocast is enabled, the scale and the limit of beta."""
    q, k, v = _check_vectors(q, k, v, "")
    _check_decay(g, k, v, "[B, H_v", 3)
    _check_numbers("beta", beta, v, "[B, H_v]")
    beta_limit = _check_gates(g, beta, v, 3, A_log, dt_bias, beta_limit)
    check_bool("qk_l2norm", qk_l2norm)
    _check_state("state", state, k, v, v.shape[0], "B")
    rows, columns = state.stride()[2:]
    dense = (columns == 1 or state.shape[3] == 1) and (rows == state.shape[3] or state.shape[2] == 1)
    if not dense or any(stride == 0 and size > 1 for size, stride in zip(state.shape, state.stride(), strict=True)):
        raise ValueError(f"state must be contiguous in its last two dimensions; got strides {state.stride()}")
    return q, k, v, _scale(scale, q), beta_limit


def _scale(scale: float | None, q: Tensor) -> float:
    if scale is None:
        return float(q.shape[-1] ** -0.5)
    (scale,) = constants(scale)
    check_positive("scale", scale)
    return scale


def _check_vectors(q: Tensor, k: Tensor, v: Tensor, tokens: str) -> tuple[Tensor, Tensor, Tensor]:
    """tokens: the layout's part between heads and width."""
    check_float("q", q)
    check_float("k", k)
    check_float("v", v)
    if (low := autocast_dtype(q)) is not None:
        q, k, v = (x if x.dtype == torch.float64 else x.to(low) for x in (q, k, v))
    check_dtype("k", k, "q", q)
    check_dtype("v", v, "q", q)
    check_device("k", k, "q", q)
    check_device("v", v, "q", q)
    rank = 4 if tokens else 3
    check_rank("q", q, rank, f"[B, H_k, {tokens}D_k]")
    check_shape("k", k, q.shape, "q's")
    check_rank("v", v, rank, f"[B, H_v, {tokens}D_v]")
    if v.shape[0] != q.shape[0] or v.shape[2:-1] != q.shape[2:-1]:
        raise ValueError(f"v must be [B, H_v, {tokens}D_v] with q's {tuple(q.shape)}; got shape {tuple(v.shape)}")
    if q.shape[1] == 0 or v.shape[1] % q.shape[1] != 0:
        raise ValueError(f"v must have a multiple of q's {q.shape[1]} heads; got {v.shape[1]}")
    for name, x, most in (("q", q, MAX_HEAD_DIM), ("v", v, MAX_VALUE_DIM)):
        if not 1 <= x.shape[-1] <= most:
            raise ValueError(f"{name} must have a head dimension of 1 to {most}; got {x.shape[-1]}")
    return q, k, v


def _check_decay(g: Tensor | None, k: Tensor, v: Tensor, layout: str, channels: int) -> None:
    """channels: the rank of a decay for each dimension of a key; without them, g has one dimension less."""
    if g is None:
        return
    check_float("g", g)
    if g.dim() == channels:
        shape = (*v.shape[:-1], k.shape[-1])
        check_shape("g", g, shape, f"{layout}, D_k]: one number for each head of v, token and dimension of a key")
    else:
        more = "for each head of v and token, or one more for each dimension of a key"
        check_shape("g", g, v.shape[:-1], f"{layout}] or {layout}, D_k]: one number {more}")
    _check_kind("g", g, v)


def _check_numbers(name: str, x: Tensor | None, v: Tensor, layout: str) -> None:
    """beta: one number for each head and token."""
    if x is None:
        return
    check_float(name, x)
    check_shape(name, x, v.shape[:-1], f"{layout}: one number for each head of v and token")
    _check_kind(name, x, v)


def _check_gates(
    g: Tensor | None, beta: Tensor | None, v: Tensor, channels: int, A_log: Tensor | None, dt_bias: Tensor | None,
    beta_limit: float | None,
) -> float | None:  # fmt: skip
    """channels: as of `_check_decay`. Returns the limit."""
    if A_log is not None:
        if g is None:
            raise ValueError("g must be given with A_log; got None")
        check_float("A_log", A_log)
        check_shape("A_log", A_log, v.shape[1:2], "[H_v]")
        _check_kind("A_log", A_log, v)
    if dt_bias is not None:
        if A_log is None or g is None:
            raise ValueError("A_log must be given with dt_bias; got None")
        check_float("dt_bias", dt_bias)
        shape, layout = (v.shape[1:2], "[H_v]") if g.dim() < channels else ((v.shape[1], g.shape[-1]), "[H_v, D_k]")
        check_shape("dt_bias", dt_bias, shape, layout)
        _check_kind("dt_bias", dt_bias, v)
    if beta_limit is None:
        return None
    if beta is None:
        raise ValueError("beta must be given with beta_limit; got None")
    (beta_limit,) = constants(beta_limit)
    check_positive("beta_limit", beta_limit)
    return beta_limit


def _check_kind(name: str, x: Tensor, v: Tensor) -> None:
    check_device(name, x, "q", v)
    if x.dtype != v.dtype and (x.dtype != torch.float32 or v.dtype == torch.float64):
        allowed = "float64" if v.dtype == torch.float64 else f"float32 or q's dtype {v.dtype}"
        raise TypeError(f"{name} must be {allowed}; got {x.dtype}")


def _check_state(name: str, state: Tensor, k: Tensor, v: Tensor, n_states: int, letter: str) -> None:
    check_tensor(name, state)
    if state.dtype != wide_dtype(v.dtype):
        raise TypeError(f"{name} must be {wide_dtype(v.dtype)}, for inputs of {v.dtype}; got {state.dtype}")
    shape = (n_states, v.shape[1], k.shape[-1], v.shape[-1])
    check_shape(name, state, shape, f"[{letter}, H_v, D_k, D_v]")
    check_device(name, state, "q", v)
