"""Allocates the results and launches the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels._triton.devices import capability
from foundry_kernels._triton.launch import launch
from foundry_kernels._triton.rows import contiguous, strides_of
from foundry_kernels.core.layout import inverse, storage_order
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_delta_rule.operators import chunks_of
from foundry_kernels.ops.gated_delta_rule.options import DeltaRuleOptions
from foundry_kernels.ops.gated_delta_rule.triton.channel_launch import channels_bwd, channels_fwd
from foundry_kernels.ops.gated_delta_rule.triton.config import chunk_length
from foundry_kernels.ops.gated_delta_rule.triton.finish import gated_delta_rule_finish_kernel
from foundry_kernels.ops.gated_delta_rule.triton.gates import gated_delta_rule_gates_kernel
from foundry_kernels.ops.gated_delta_rule.triton.gradients import (
    gated_delta_rule_dqk_kernel,
    gated_delta_rule_pairs_kernel,
)
from foundry_kernels.ops.gated_delta_rule.triton.outputs import gated_delta_rule_outputs_kernel
from foundry_kernels.ops.gated_delta_rule.triton.prepare import gated_delta_rule_prepare_kernel
from foundry_kernels.ops.gated_delta_rule.triton.problem import Problem, plan, plan_finish, plan_gates
from foundry_kernels.ops.gated_delta_rule.triton.states import (
    gated_delta_rule_dstates_kernel,
    gated_delta_rule_states_kernel,
)


def _rows(x: Tensor) -> Tensor:
    """x, or a copy if its rows are not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _state(x: Tensor | None) -> Tensor | None:
    return None if x is None else _rows(x)


def _empty(x: Tensor) -> Tensor:
    """Memory for a tensor like x, dense and in x's storage order; sizes may be symbolic."""
    order = storage_order(x)
    return torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device).permute(inverse(order))


class Prepared(NamedTuple):
    """What `prepare` writes of each token; see its kernel."""

    decay: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


def _prepare(
    p: Problem, q: Tensor, k: Tensor, g: Tensor | None, beta: Tensor | None, A_log: Tensor | None,
    dt_bias: Tensor | None, dout: Tensor | None, cu_seqlens: Tensor | None, inverse: Tensor | None,
    du: Tensor | None, parts: int,
) -> tuple[Prepared, Tensor | None]:  # fmt: skip
    """Fills `inverse` and `du`, if they are given. Returns beta behind its gate, too."""
    shape = (p.n_batch, p.n_heads, p.tokens)
    decay = None if g is None else g.new_empty((2, *shape), dtype=p.compute)
    norms: list[Tensor | None] = [None, None]
    if p.l2norm:
        norms = [q.new_empty((p.n_batch, p.n_kv_heads, p.tokens), dtype=p.compute) for _ in "qk"]
    made = Prepared(decay, *norms)
    opened = None if p.beta_limit is None else q.new_empty(shape, dtype=p.compute)
    if p.tokens and any(x is not None for x in (*made, inverse, du, opened)):
        strides = tuple(map(strides_of, (q, k, g, beta, dout)))
        launch(
            gated_delta_rule_prepare_kernel, plan("prepare", p, strides, PARTS=parts),
            q, k, g, beta, A_log, dt_bias, dout, cu_seqlens, decay, *norms, inverse, du, opened,
        )  # fmt: skip
    return made, beta if opened is None else opened


def _states(
    p: Problem, k: Tensor, v: Tensor, beta: Tensor | None, made: Prepared, inverse: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, final: Tensor | None, parts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The states at the chunks' starts and the corrected values; fills `final`, if it is given."""
    states = v.new_empty((p.n_batch, p.n_heads, p.n_chunks, p.head_dim, p.head_dim_v), dtype=p.compute)
    updates = v.new_empty((p.n_batch, p.n_heads, p.tokens, p.head_dim_v), dtype=p.compute)
    strides = tuple(map(strides_of, (k, v, beta, initial)))
    launch(
        gated_delta_rule_states_kernel, plan("states", p, strides, PARTS=parts),
        k, v, beta, made.decay, made.k_norm, None, None, inverse, initial, cu_seqlens, states, updates, final,
    )  # fmt: skip
    return states, updates


def _empty_inverse(k: Tensor, v: Tensor, g: Tensor | None, options: DeltaRuleOptions) -> Tensor:
    width = max(k.shape[3], v.shape[3])
    channels = g is not None and g.dim() == 4
    chunk = chunk_length(options.chunk_size, width, v.dtype, capability(v.device), channels)
    n_documents = None if options.cu_seqlens is None else options.cu_seqlens.shape[0] - 1
    n_chunks = chunks_of(v.shape[2], chunk, n_documents) if options.delta else 0
    return v.new_empty((*v.shape[:2], n_chunks, chunk, chunk), dtype=wide_dtype(v.dtype))


def empty_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None,
    A_log: Tensor | None, dt_bias: Tensor | None, *args: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The results of the forward operator, not filled."""
    options, (need_final_state, save_states) = DeltaRuleOptions.from_operator_args(args)
    cu_seqlens = options.cu_seqlens
    n_states = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (n_states, v.shape[1], k.shape[3], v.shape[3])
    final = v.new_empty(shape, dtype=wide_dtype(v.dtype)) if need_final_state else None
    return _empty(v), final, _empty_inverse(k, v, g, options) if save_states else None


def launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None,
    A_log: Tensor | None, dt_bias: Tensor | None, *args: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    options, (need_final_state, save_states) = DeltaRuleOptions.from_operator_args(args)
    out = _empty(v)
    inverse = _empty_inverse(k, v, g, options) if save_states or options.delta else None
    p = Problem.of(k, v, g, options)
    A_log, dt_bias = contiguous(A_log), contiguous(dt_bias)
    q, k, v, initial_state, cu_seqlens = _rows(q), _rows(k), _rows(v), _state(initial_state), options.cu_seqlens
    shape = (p.n_states, p.n_heads, p.head_dim, p.head_dim_v)
    final = v.new_empty(shape, dtype=p.compute) if need_final_state else None
    if p.n_states * p.n_heads == 0:
        return out, final, inverse if save_states else None
    used = inverse if options.delta else None
    cu_seqlens = contiguous(cu_seqlens)
    parts = p.parts(out, final)
    if g is not None and g.dim() == 4:
        channels_fwd(p, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, out, final, used)
        return out, final, inverse if save_states else None
    made, beta = _prepare(p, q, k, g, beta, A_log, dt_bias, None, cu_seqlens, used, None, parts)
    states, updates = _states(p, k, v, beta, made, used, initial_state, cu_seqlens, final, parts)
    if p.tokens:
        strides = (q.stride(), k.stride(), out.stride())
        launch(
            gated_delta_rule_outputs_kernel, plan("outputs", p, strides),
            q, k, *made, states, updates, cu_seqlens, out,
        )  # fmt: skip
    return out, final, inverse if save_states else None


def empty_bwd(
    dout: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
    beta: Tensor | None, initial_state: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, states: Tensor,
    *args: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The results of the backward operator, not filled."""
    _, needs = DeltaRuleOptions.from_operator_args(args)
    need_dq, need_dk, need_dv, *others = needs
    dg, dbeta, dinitial, dA_log, ddt_bias = (
        x.new_empty(x.shape) if need and x is not None else None
        for x, need in zip((g, beta, initial_state, A_log, dt_bias), others, strict=True)
    )
    rows = (_empty(x) if need else None for x, need in ((q, need_dq), (k, need_dk), (v, need_dv)))
    return *rows, dg, dbeta, dinitial, dA_log, ddt_bias


def launch_bwd(
    dout: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
    beta: Tensor | None, initial_state: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None,
    inverse: Tensor, *args: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    options, _ = DeltaRuleOptions.from_operator_args(args)
    results = empty_bwd(dout, dfinal_state, q, k, v, g, beta, initial_state, A_log, dt_bias, inverse, *args)
    dq, dk, dv, dg, dbeta, dinitial, dA_log, ddt_bias = results
    p = Problem.of(k, v, g, options)
    if p.n_states * p.n_heads == 0 or p.tokens == 0:
        for x in (dA_log, ddt_bias):
            if x is not None:
                x.zero_()
    if p.n_states * p.n_heads == 0:
        return results
    A_log, dt_bias = contiguous(A_log), contiguous(dt_bias)
    before = g, beta
    of_gates = dg, dbeta, dA_log, ddt_bias
    if A_log is not None and g is not None and any(x is not None for x in (dg, dA_log, ddt_bias)):
        dg = g.new_empty(g.shape, dtype=p.compute)
    if p.beta_limit is not None and dbeta is not None:
        dbeta = dbeta.new_empty(dbeta.shape, dtype=p.compute)
    found = dq, dk, dv, dg, dbeta, dinitial
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    initial, dfinal, cu_seqlens = _state(initial_state), _state(dfinal_state), contiguous(options.cu_seqlens)
    used = inverse if options.delta else None
    parts = p.parts(*found)
    if g is not None and g.dim() == 4:
        channels_bwd(p, dout, dfinal, q, k, v, g, beta, initial, A_log, dt_bias, cu_seqlens, used, found)
        _close_gates(p, *before, A_log, dt_bias, dg, dbeta, cu_seqlens, *of_gates)
        return results
    dr = v.new_empty((p.n_batch, p.n_heads, p.tokens, p.head_dim_v), dtype=p.compute)
    made, beta = _prepare(p, q, k, g, beta, A_log, dt_bias, dout, cu_seqlens, None, dr, parts)
    states, updates = _states(p, k, v, beta, made, used, initial, cu_seqlens, None, parts)
    dstates = torch.empty_like(states)
    strides = tuple(map(strides_of, (q, k, beta, dout, dfinal)))
    launch(
        gated_delta_rule_dstates_kernel, plan("dstates", p, strides, PARTS=parts),
        q, k, beta, dout, *made, None, None, used, dfinal, cu_seqlens, dstates, dr, dinitial,
    )  # fmt: skip
    if all(x is None for x in (dq, dk, dv, dg, dbeta)) or p.tokens == 0:
        return results
    sums, dq_norm, dk_norm = None, dq, dk
    if dg is not None or dbeta is not None:
        sums = v.new_empty((2 + 4 * p.blocks("dqk"), p.n_batch, p.n_heads, p.tokens), dtype=p.compute)
    of_scores = v.new_empty((p.n_batch, p.n_heads, p.n_chunks, p.chunk, p.chunk), dtype=p.compute)
    of_keys = torch.empty_like(of_scores) if p.delta else None
    strides = tuple(map(strides_of, (q, k, v, beta, dout, dv)))
    launch(
        gated_delta_rule_pairs_kernel, plan("pairs", p, strides, PARTS=parts),
        q, k, v, beta, dout, *made, updates, dr, cu_seqlens, of_scores, of_keys, dv, sums,
    )  # fmt: skip
    if p.l2norm:  # of the normalized ones
        dq_norm, dk_norm = (dx if dx is None else dx.new_empty(dx.shape, dtype=p.compute) for dx in (dq, dk))
    if sums is not None or dq is not None or dk is not None:
        strides = tuple(map(strides_of, (q, k, beta, dout, dq_norm, dk_norm)))
        launch(
            gated_delta_rule_dqk_kernel, plan("dqk", p, strides, PARTS=parts),
            q, k, beta, dout, *made, states, updates, dstates, dr, of_scores, of_keys, cu_seqlens,
            dq_norm, dk_norm, sums,
        )  # fmt: skip
    if not p.l2norm:
        dq_norm, dk_norm = None, None
    if sums is not None or dq_norm is not None or dk_norm is not None:
        launch(
            gated_delta_rule_finish_kernel, plan_finish(p, tuple(map(strides_of, (q, k, beta, dq, dk)))),
            sums, q, k, beta, made.q_norm, made.k_norm, dq_norm, dk_norm, cu_seqlens, dg, dbeta, dq, dk,
        )  # fmt: skip
    _close_gates(p, *before, A_log, dt_bias, dg, dbeta, cu_seqlens, *of_gates)
    return results


def _close_gates(
    p: Problem, g: Tensor | None, beta: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None,
    dg_open: Tensor | None, dbeta_open: Tensor | None, cu_seqlens: Tensor | None,
    dg: Tensor | None, dbeta: Tensor | None, dA_log: Tensor | None, ddt_bias: Tensor | None,
) -> None:  # fmt: skip
    """Fills the last four results from the gradients behind the gates."""
    if dg_open is dg:  # there is no gate, or nothing of it is needed
        dg_open = dg = None
    if dbeta_open is dbeta:
        dbeta_open = dbeta = None
    if p.tokens == 0 or (dg_open is None and dbeta_open is None):
        return
    if g is not None and p.channels and g.stride(-1) != 1:
        g = g.contiguous()
    of_log, of_bias = (
        None if x is None else x.new_zeros((p.n_batch, p.n_heads, p.n_chunks, *x.shape[1:]), dtype=p.compute)
        for x in (dA_log, ddt_bias)
    )
    launch(
        gated_delta_rule_gates_kernel, plan_gates(p, tuple(map(strides_of, (g, beta)))),
        g, beta, A_log, dt_bias, dg_open, dbeta_open, cu_seqlens, dg, dbeta, of_log, of_bias,
    )  # fmt: skip
    for x, parts in ((dA_log, of_log), (ddt_bias, of_bias)):
        if x is not None and parts is not None:
            x.copy_(parts.sum((0, 2), dtype=torch.float64))
