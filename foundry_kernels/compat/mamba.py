"""Functions of the packages causal-conv1d and mamba_ssm (Mamba-2), with their signatures and layouts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.compat.scalars import as_float, as_int
from foundry_kernels.core.checks import (
    check_bool,
    check_documents,
    check_float,
    check_integer,
    check_rank,
    check_shape,
)
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.short_conv1d import short_conv1d, short_conv1d_step
from foundry_kernels.ops.ssd import ssd, ssd_step


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    final_states_out: Tensor | None = None,
    activation: str | None = None,
    *,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """``causal_conv1d.causal_conv1d_fn`` on :func:`foundry_kernels.short_conv1d`.

    Args:
        x: ``[B, C, T]``.
        weight: ``[C, W]``, W in 1 .. 8.
        bias: ``[C]``, or None.
        seq_idx: ``[B, T]`` integers, or None: where it changes in a row, a document begins, which no tap crosses. At
            tokens with a negative one y is 0. Its values are read.
        initial_states: ``[B, C, W - 1]``, the inputs before each row's first token, or None.
        return_final_states: also return the last W - 1 inputs, ``[B, C, W - 1]``; not with `seq_idx`.
        final_states_out: must be None.
        activation: None, "silu" or "swish".
        backend: "auto", "reference", "triton" or "native".

    Returns:
        y ``[B, C, T]``, a view of ``[B, T, C]``; with `return_final_states`, ``(y, final_states)``.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    check_float("x", x)
    check_rank("x", x, 3, "[B, C, T]")
    if final_states_out is not None:
        raise ValueError("final_states_out must be None; return_final_states=True returns new states")
    rows, totals = x.transpose(1, 2), None
    if seq_idx is not None:
        if return_final_states:
            raise ValueError("seq_idx must be None with return_final_states; got a tensor")
        totals = _documents(seq_idx, rows)
        if initial_states is not None:
            check_float("initial_states", initial_states)
            check_shape("initial_states", initial_states, (*x.shape[:2], weight.shape[-1] - 1), "[B, C, W - 1]")
            initial_states = _of_documents(initial_states, totals, x.shape[2])
        rows = rows.reshape(1, -1, rows.shape[2])
    found = short_conv1d(
        rows, weight, bias, activation, cu_seqlens=totals, initial_state=initial_states,
        return_final_state=return_final_states, backend=backend,
    )  # fmt: skip
    y, final = found if isinstance(found, tuple) else (found, None)
    y = y.view(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)
    if seq_idx is not None and bool((padding := seq_idx < 0).any()):
        y = y.masked_fill(padding[:, None], 0.0)
    return y if final is None else (y, final)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    cache_seqlens: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """``causal_conv1d.causal_conv1d_update`` on :func:`foundry_kernels.short_conv1d_step`.

    Args:
        x: ``[B, C]``, or ``[B, C, T]`` of T new tokens.
        conv_state: ``[B, C, S]``, S at least W - 1, which is overwritten by the newest S inputs.
        weight, bias, activation, backend: as for :func:`causal_conv1d_fn`.
        cache_seqlens: must be None: the newest input is the last.
        conv_state_indices: ``[B]`` integers, the row of `conv_state`, which may have others, of each sequence; or None.
            A negative one marks padding, whose y is 0. Its values are read.

    Returns:
        y of x's shape.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if cache_seqlens is not None:
        raise ValueError("cache_seqlens must be None: the newest input of a row of conv_state is the last")
    check_float("x", x)
    if conv_state_indices is not None:
        check_float("conv_state", conv_state)
        at = _rows("conv_state_indices", conv_state_indices, x)
        own = conv_state[at.clamp(0)]
        y = causal_conv1d_update(x, own, weight, bias, activation, backend=backend)
        kept = at >= 0
        conv_state[at[kept]] = own[kept]
        return y.masked_fill(~kept.view(-1, *[1] * (y.dim() - 1)), 0.0)
    if x.dim() == 2:
        return short_conv1d_step(x, conv_state, weight, bias, activation, backend=backend)
    check_rank("x", x, 3, "[B, C, T] or [B, C]")
    steps = [
        short_conv1d_step(each, conv_state, weight, bias, activation, backend=backend) for each in x.unbind(2)
    ]  # each checks its arguments
    return torch.stack(steps, 2) if steps else torch.empty_like(x)


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    return_varlen_states: bool = False,
    *,
    backend: str = "auto",
) -> Any:
    """``mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined`` on :func:`foundry_kernels.ssd`.

    Args:
        x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, backend: as for :func:`foundry_kernels.ssd`.
        chunk_size: an int, which has no effect: kernels choose their own.
        initial_states: ``[B, H, P, N]``, the states before each row's first token, or None.
        seq_idx: ``[B, T]`` integers, or None: where it changes in a row, a document begins, which gets nothing from
            those before. Its values are read.
        cu_seqlens: used only with `return_varlen_states`: ``[n + 1]``, the ends of n packed documents, starting with 0,
            in one row. They also take the place of `seq_idx`.
        return_final_states: also return the states after each row's last token, ``[B, H, P, N]``.
        return_varlen_states: also return the states after each document, ``[n, H, P, N]``.

    Returns:
        y ``[B, T, H, P]``; with one of the last two, ``(y, states)``; with both, ``(y, final_states, varlen_states)``.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    as_int("chunk_size", chunk_size)
    for name, flag in (("return_final_states", return_final_states), ("return_varlen_states", return_varlen_states)):
        check_bool(name, flag)
    if return_varlen_states and cu_seqlens is None:
        raise ValueError("cu_seqlens must be given with return_varlen_states; got None")
    limits = as_float("dt_limit", dt_limit[0]), as_float("dt_limit", dt_limit[1])
    given: dict[str, Any] = {"dt_softplus": dt_softplus, "dt_limit": limits, "backend": backend}
    check_float("x", x)
    if initial_states is not None:
        check_float("initial_states", initial_states)
        initial_states = initial_states.to(wide_dtype(x.dtype))
    given |= {"return_final_states": return_final_states, "initial_states": initial_states}
    if seq_idx is None and not return_varlen_states:
        return ssd(x, dt, A, B, C, D, z, dt_bias, **given)
    check_rank("x", x, 4, "[B, T, H, P]")
    if cu_seqlens is not None and return_varlen_states:
        if x.shape[0] != 1:
            raise ValueError(f"x must be [1, T, H, P] with return_varlen_states; got shape {tuple(x.shape)}")
        check_documents(cu_seqlens, "x", x, x.shape[1])
        totals = cu_seqlens
    else:
        totals = _documents(seq_idx, x)
    packed: list[Any] = [None if each is None else each.reshape(1, -1, *each.shape[2:]) for each in (x, dt, B, C, z)]
    if initial_states is not None:
        check_shape("initial_states", initial_states, (x.shape[0], *x.shape[2:], B.shape[-1]), "[B, H, P, N]")
        given["initial_states"] = _of_documents(initial_states, totals, x.shape[1])
    given["return_final_states"] = return_final_states or return_varlen_states
    x_packed, dt, B, C, z = packed
    found: Any = ssd(x_packed, dt, A, B, C, D, z, dt_bias, cu_seqlens=totals, **given)
    if not given["return_final_states"]:
        return found.view(x.shape)
    y, states = found
    results = [y.view(x.shape)]
    if return_final_states:
        ends = torch.arange(1, x.shape[0] + 1, device=x.device, dtype=totals.dtype) * x.shape[1]
        results.append(states[torch.searchsorted(totals, ends) - 1])
    return tuple(results + [states] * return_varlen_states)


def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """``mamba_ssm.ops.triton.selective_state_update.selective_state_update`` on :func:`foundry_kernels.ssd_step`, for
    Mamba-2's heads.

    Args:
        state: ``[B, H, P, N]``, which is overwritten.
        x: ``[B, H, P]``.
        dt: ``[B, H, P]``, one number for each head, expanded.
        A: ``[H, P, N]``, one number for each head, expanded.
        B: ``[B, G, N]``.
        C: as B.
        D: ``[H, P]``, or None.
        z: as x, or None.
        dt_bias: ``[H, P]``, one number for each head, expanded; or None.
        dt_softplus, backend: as for :func:`foundry_kernels.ssd`.
        state_batch_indices: ``[B]`` integers, the row of `state`, which may have others, of each sequence; or None. A
            negative one marks padding, whose y is 0. Its values are read.

    Returns:
        y ``[B, H, P]``.

    Raises:
        TypeError, ValueError: an argument does not fit. A number for each entry, as Mamba-1 has, is not supported.
    """
    check_float("state", state)
    check_rank("state", state, 4, "[B, H, P, N] of Mamba-2")
    check_bool("dt_softplus", dt_softplus)
    bias = None if dt_bias is None else _of_heads("dt_bias", dt_bias, 2, "[H, P]")
    of_dt, of_A = _of_heads("dt", dt, 3, "[B, H, P]"), _of_heads("A", A, 3, "[H, P, N]")
    own, at = state, None
    if state_batch_indices is not None:
        at = _rows("state_batch_indices", state_batch_indices, x)
        own = state[at.clamp(0)]
    wide = own.to(wide_dtype(x.dtype))
    y = ssd_step(wide, x, of_dt, of_A, B, C, D, z, bias, dt_softplus=dt_softplus, backend=backend)
    if at is None:
        return y if wide is state else (state.copy_(wide), y)[1]
    kept = at >= 0
    state[at[kept]] = wide[kept].to(state.dtype)
    return torch.where(kept[:, None, None], y, 0.0)


def _of_heads(name: str, x: Tensor, rank: int, layout: str) -> Tensor:
    """The numbers of heads that were expanded."""
    check_float(name, x)
    check_rank(name, x, rank, layout)
    kept = 1 if name != "dt" else 2
    if any(x.shape[d] != 1 and x.stride(d) != 0 for d in range(kept, rank)):
        raise ValueError(f"{name} must be one number for each head, expanded to {layout}; got strides {x.stride()}")
    for _ in range(rank - kept):
        x = x[..., 0]
    return x


def _rows(name: str, indices: Tensor, x: Tensor) -> Tensor:
    """The rows ``[B]`` of states that belong to x's, as int64."""
    check_integer(name, indices)
    check_shape(name, indices, (x.shape[0],), "[B]")
    return indices.long()


def _of_documents(states: Tensor, totals: Tensor, length: int) -> Tensor:
    """States of all documents, of which the first ones of rows of `length` tokens have `states`; the others' are 0."""
    begins = torch.arange(len(states), device=states.device, dtype=totals.dtype) * length
    first = torch.searchsorted(totals, begins, right=True) - 1
    return states.new_zeros((len(totals) - 1, *states.shape[1:])).index_copy(0, first, states)


def _documents(seq_idx: Tensor | None, x: Tensor) -> Tensor:
    """``[n + 1]`` int32: the ends of the documents of rows ``[B, T, ...]`` one after another."""
    assert seq_idx is not None
    check_integer("seq_idx", seq_idx)
    check_shape("seq_idx", seq_idx, tuple(x.shape[:2]), "[B, T]")
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), seq_idx.numel())]).to(torch.int32)
