"""Functions of the packages causal-conv1d and mamba_ssm (Mamba-2), with their signatures and layouts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.compat.scalars import as_float, as_int
from foundry_kernels.core.checks import check_bool, check_float, check_integer, check_rank, check_shape
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
        seq_idx: ``[B, T]`` integers, or None: where it changes in a row, a document begins, which no tap crosses. Its
            values are read. It excludes both kinds of states.
        initial_states: ``[B, C, W - 1]``, or None.
        return_final_states: also return the last W - 1 inputs, ``[B, C, W - 1]``.
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
        if initial_states is not None or return_final_states:
            raise ValueError("seq_idx must be None with states")
        totals = _documents(seq_idx, rows)
        rows = rows.reshape(1, -1, rows.shape[2])
    found = short_conv1d(
        rows, weight, bias, activation, cu_seqlens=totals, initial_state=initial_states,
        return_final_state=return_final_states, backend=backend,
    )  # fmt: skip
    y, final = found if isinstance(found, tuple) else (found, None)
    y = y.view(x.shape[0], x.shape[2], x.shape[1]).transpose(1, 2)
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
        cache_seqlens, conv_state_indices: must be None.

    Returns:
        y of x's shape.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    for name, given in (("cache_seqlens", cache_seqlens), ("conv_state_indices", conv_state_indices)):
        if given is not None:
            raise ValueError(f"{name} must be None: a state is a row of conv_state, its newest input last")
    check_float("x", x)
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
        initial_states: ``[B, H, P, N]`` float32, the states before each row's first token, or None.
        seq_idx: ``[B, T]`` integers, or None: where it changes in a row, a document begins, which gets nothing from
            those before. Its values are read.
        cu_seqlens, return_varlen_states: must be None and False. `ssd` has the states of packed documents.
        return_final_states: also return the states after each row's last token, ``[B, H, P, N]``.

    Returns:
        y ``[B, T, H, P]``; with `return_final_states`, ``(y, final_states)``.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    as_int("chunk_size", chunk_size)
    if cu_seqlens is not None or return_varlen_states:
        raise ValueError(
            "cu_seqlens must be None and return_varlen_states False; foundry_kernels.ssd(..., cu_seqlens=..., "
            "return_final_states=True) returns the states of packed documents"
        )
    limits = as_float("dt_limit", dt_limit[0]), as_float("dt_limit", dt_limit[1])
    given: dict[str, Any] = {"dt_softplus": dt_softplus, "dt_limit": limits, "backend": backend}
    given |= {"return_final_states": return_final_states, "initial_states": initial_states}
    if seq_idx is None:
        return ssd(x, dt, A, B, C, D, z, dt_bias, **given)
    check_float("x", x)
    check_rank("x", x, 4, "[B, T, H, P]")
    totals = _documents(seq_idx, x)
    # The first and the last document of each row.
    ends = torch.arange(x.shape[0] + 1, device=x.device) * x.shape[1]
    first = torch.searchsorted(totals, ends.to(totals.dtype))
    if initial_states is not None:
        shape = (x.shape[0], *x.shape[2:], B.shape[-1])
        check_float("initial_states", initial_states)
        check_shape("initial_states", initial_states, shape, "[B, H, P, N]")
        of_others = initial_states.new_zeros((len(totals) - 1, *shape[1:]))
        given["initial_states"] = of_others.index_copy(0, first[:-1], initial_states)
    x_packed, dt, B, C = (each.reshape(1, -1, *each.shape[2:]) for each in (x, dt, B, C))
    z = None if z is None else z.reshape(1, -1, *z.shape[2:])
    found: Any = ssd(x_packed, dt, A, B, C, D, z, dt_bias, cu_seqlens=totals, **given)
    y, states = found if isinstance(found, tuple) else (found, None)
    return y.view(x.shape) if states is None else (y.view(x.shape), states[first[1:] - 1])


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
        state: ``[B, H, P, N]`` float32, which is overwritten.
        x: ``[B, H, P]``.
        dt: ``[B, H, P]``, one number for each head, expanded.
        A: ``[H, P, N]``, one number for each head, expanded.
        B: ``[B, G, N]``.
        C: as B.
        D: ``[H, P]``, or None.
        z: as x, or None.
        dt_bias: ``[H, P]``, one number for each head, expanded; or None.
        dt_softplus, backend: as for :func:`foundry_kernels.ssd`.
        state_batch_indices: must be None.

    Returns:
        y ``[B, H, P]``.

    Raises:
        TypeError, ValueError: an argument does not fit. A number for each entry, as Mamba-1 has, is not supported.
    """
    if state_batch_indices is not None:
        raise ValueError("state_batch_indices must be None; pass the rows of the states")
    check_bool("dt_softplus", dt_softplus)
    bias = None if dt_bias is None else _of_heads("dt_bias", dt_bias, 2, "[H, P]")
    of_dt, of_A = _of_heads("dt", dt, 3, "[B, H, P]"), _of_heads("A", A, 3, "[H, P, N]")
    return ssd_step(state, x, of_dt, of_A, B, C, D, z, bias, dt_softplus=dt_softplus, backend=backend)


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


def _documents(seq_idx: Tensor, x: Tensor) -> Tensor:
    """``[n + 1]`` int32: the ends of the documents of rows ``[B, T, ...]`` one after another."""
    check_integer("seq_idx", seq_idx)
    check_shape("seq_idx", seq_idx, tuple(x.shape[:2]), "[B, T]")
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_full((1,), seq_idx.numel())]).to(torch.int32)
