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
from foundry_kernels.ops.gated_delta_rule.triton.config import chunk_length
from foundry_kernels.ops.gated_delta_rule.triton.finish import (
    gated_delta_rule_dnorm_kernel,
    gated_delta_rule_finish_kernel,
)
from foundry_kernels.ops.gated_delta_rule.triton.gradients import (
    gated_delta_rule_dk_kernel,
    gated_delta_rule_dq_kernel,
    gated_delta_rule_du_kernel,
    gated_delta_rule_pairs_kernel,
)
from foundry_kernels.ops.gated_delta_rule.triton.outputs import gated_delta_rule_outputs_kernel
from foundry_kernels.ops.gated_delta_rule.triton.prepare import gated_delta_rule_prepare_kernel
from foundry_kernels.ops.gated_delta_rule.triton.problem import Problem, plan, plan_dnorm, plan_finish
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
    """What `prepare` writes; see its kernel."""

    decay: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None


def _prepare(
    p: Problem, q: Tensor, k: Tensor, g: Tensor | None, beta: Tensor | None, cu_seqlens: Tensor | None,
    inverse: Tensor | None,
) -> Prepared:  # fmt: skip
    """Fills `inverse`, if it is given."""
    shape = (p.n_batch, p.n_heads, p.tokens)
    decay = None if g is None else g.new_empty((2, *shape), dtype=p.compute)
    norms: list[Tensor | None] = [None, None]
    if p.l2norm:
        norms = [q.new_empty((p.n_batch, p.n_kv_heads, p.tokens), dtype=p.compute) for _ in "qk"]
    made = Prepared(decay, *norms)
    if any(x is not None for x in (*made, inverse)):
        strides = tuple(map(strides_of, (q, k, g, beta)))
        launch(
            gated_delta_rule_prepare_kernel, plan("prepare", p, strides),
            q, k, g, beta, cu_seqlens, decay, *norms, inverse,
        )  # fmt: skip
    return made


def _states(
    p: Problem, k: Tensor, v: Tensor, beta: Tensor | None, made: Prepared, inverse: Tensor | None,
    initial: Tensor | None, cu_seqlens: Tensor | None, need_final: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The states at the chunks' starts, the corrected values, and the final state."""

    def empty(*shape: int) -> Tensor:
        return v.new_empty(shape, dtype=p.compute)

    states = empty(p.n_batch, p.n_heads, p.n_chunks, p.head_dim, p.head_dim_v)
    updates = empty(p.n_batch, p.n_heads, p.tokens, p.head_dim_v)
    final = empty(p.n_states, p.n_heads, p.head_dim, p.head_dim_v) if need_final else None
    strides = tuple(map(strides_of, (k, v, beta, initial)))
    launch(
        gated_delta_rule_states_kernel, plan("states", p, strides),
        k, v, beta, made.decay, made.k_norm, inverse, initial, cu_seqlens, states, updates, final,
    )  # fmt: skip
    return states, updates, final


def _empty_inverse(k: Tensor, v: Tensor, options: DeltaRuleOptions) -> Tensor:
    width = max(k.shape[3], v.shape[3])
    chunk = chunk_length(options.chunk_size, width, v.dtype, capability(v.device))
    n_documents = None if options.cu_seqlens is None else options.cu_seqlens.shape[0] - 1
    n_chunks = chunks_of(v.shape[2], chunk, n_documents) if options.delta else 0
    return v.new_empty((*v.shape[:2], n_chunks, chunk, chunk), dtype=wide_dtype(v.dtype))


def empty_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None, *args: Any
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The results of the forward operator, not filled."""
    options, (need_final_state, save_states) = DeltaRuleOptions.from_operator_args(args)
    cu_seqlens = options.cu_seqlens
    n_states = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (n_states, v.shape[1], k.shape[3], v.shape[3])
    final = v.new_empty(shape, dtype=wide_dtype(v.dtype)) if need_final_state else None
    return _empty(v), final, _empty_inverse(k, v, options) if save_states else None


def launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, initial_state: Tensor | None, *args: Any
) -> tuple[Tensor | None, ...]:  # fmt: skip
    options, (need_final_state, save_states) = DeltaRuleOptions.from_operator_args(args)
    out = _empty(v)
    inverse = _empty_inverse(k, v, options) if save_states or options.delta else None
    p = Problem.of(k, v, options)
    q, k, v, initial_state, cu_seqlens = _rows(q), _rows(k), _rows(v), _state(initial_state), options.cu_seqlens
    if p.n_states * p.n_heads == 0:
        shape = (p.n_states, p.n_heads, p.head_dim, p.head_dim_v)
        final = v.new_empty(shape, dtype=p.compute) if need_final_state else None
        return out, final, inverse if save_states else None
    used = inverse if options.delta else None
    cu_seqlens = contiguous(cu_seqlens)
    made = _prepare(p, q, k, g, beta, cu_seqlens, used) if p.tokens else Prepared(None, None, None)
    states, updates, final = _states(p, k, v, beta, made, used, initial_state, cu_seqlens, need_final_state)
    if p.tokens:
        strides = (q.stride(), k.stride(), out.stride())
        launch(
            gated_delta_rule_outputs_kernel, plan("outputs", p, strides),
            q, k, *made, states, updates, cu_seqlens, out,
        )  # fmt: skip
    return out, final, inverse if save_states else None


def empty_bwd(
    dout: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
    beta: Tensor | None, initial_state: Tensor | None, states: Tensor, *args: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """The results of the backward operator, not filled."""
    _, needs = DeltaRuleOptions.from_operator_args(args)
    need_dq, need_dk, need_dv, need_dg, need_dbeta, need_dinitial = needs
    dg, dbeta, dinitial = (
        x.new_empty(x.shape) if need and x is not None else None
        for x, need in ((g, need_dg), (beta, need_dbeta), (initial_state, need_dinitial))
    )
    rows = (_empty(x) if need else None for x, need in ((q, need_dq), (k, need_dk), (v, need_dv)))
    return *rows, dg, dbeta, dinitial


def launch_bwd(
    dout: Tensor, dfinal_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None,
    beta: Tensor | None, initial_state: Tensor | None, inverse: Tensor, *args: Any,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    options, _ = DeltaRuleOptions.from_operator_args(args)
    results = empty_bwd(dout, dfinal_state, q, k, v, g, beta, initial_state, inverse, *args)
    dq, dk, dv, dg, dbeta, dinitial = results
    p = Problem.of(k, v, options)
    if p.n_states * p.n_heads == 0:
        return results
    q, k, v, dout = _rows(q), _rows(k), _rows(v), _rows(dout)
    initial, dfinal, cu_seqlens = _state(initial_state), _state(dfinal_state), contiguous(options.cu_seqlens)
    used = inverse if options.delta else None
    made = _prepare(p, q, k, g, beta, cu_seqlens, None) if p.tokens else Prepared(None, None, None)
    states, updates, _ = _states(p, k, v, beta, made, used, initial, cu_seqlens, False)
    dstates, dr = torch.empty_like(states), torch.empty_like(updates)
    if p.tokens:
        strides = tuple(map(strides_of, (q, k, dout)))
        launch(gated_delta_rule_du_kernel, plan("du", p, strides), q, k, dout, *made, cu_seqlens, dr)
    strides = tuple(map(strides_of, (q, k, beta, dout, dfinal)))
    launch(
        gated_delta_rule_dstates_kernel, plan("dstates", p, strides),
        q, k, beta, dout, *made, used, dfinal, cu_seqlens, dstates, dr, dinitial,
    )  # fmt: skip
    if p.tokens:
        tensors = (q, k, v, beta, dout), made, (states, updates, dstates, dr), cu_seqlens
        _launch_gradients(p, *tensors, dq, dk, dv, dg, dbeta)
    return results


def _launch_gradients(
    p: Problem, inputs: tuple[Any, ...], made: Prepared, between: tuple[Any, ...], cu_seqlens: Tensor | None,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, dg: Tensor | None, dbeta: Tensor | None,
) -> None:  # fmt: skip
    q, k, v, beta, dout = inputs
    states, updates, dstates, dr = between
    # The gradients of g and beta may be float32 where the others are not.
    parts = 3 if any(x is not None and x.dtype != p.dtype for x in (dg, dbeta)) else 2
    shape = (p.n_batch, p.n_heads, p.tokens)
    of_pairs, of_q, of_k = None, None, None
    if dg is not None or dbeta is not None:
        of_pairs, of_q, of_k = (
            v.new_empty((n, *shape), dtype=p.compute) for n in (2, p.blocks("dq"), 3 * p.blocks("dk"))
        )
    squares = (p.n_batch, p.n_heads, p.n_chunks, p.chunk, p.chunk)
    of_scores = v.new_empty(squares, dtype=p.compute)
    of_keys = torch.empty_like(of_scores) if p.delta else None
    strides = tuple(map(strides_of, (q, k, v, beta, dout, dv)))
    launch(
        gated_delta_rule_pairs_kernel, plan("pairs", p, strides, PARTS=parts),
        q, k, v, beta, dout, *made, updates, dr, cu_seqlens, of_scores, of_keys, dv, of_pairs,
    )  # fmt: skip

    def of_norm(x: Tensor, dx: Tensor | None) -> Tensor | None:
        """Where the gradient of the normalized x is written."""
        return dx if dx is None or not p.l2norm else torch.empty(x.shape, dtype=p.compute, device=x.device)

    dq_norm, dk_norm = of_norm(q, dq), of_norm(k, dk)
    if dq is not None or dg is not None:
        strides = tuple(map(strides_of, (q, k, dout, dq_norm)))
        launch(
            gated_delta_rule_dq_kernel, plan("dq", p, strides, PARTS=parts),
            q, k, dout, made.decay, made.q_norm, states, of_scores, cu_seqlens, dq_norm, of_q,
        )  # fmt: skip
    if dk is not None or of_k is not None:
        strides = tuple(map(strides_of, (q, k, beta, dk_norm)))
        launch(
            gated_delta_rule_dk_kernel, plan("dk", p, strides, PARTS=parts),
            q, k, beta, made.decay, made.k_norm, states, updates, dstates, dr, of_scores, of_keys, cu_seqlens,
            dk_norm, of_k,
        )  # fmt: skip
    if of_k is not None:
        launch(
            gated_delta_rule_finish_kernel, plan_finish(p, strides_of(beta)),
            beta, of_pairs, of_q, of_k, cu_seqlens, dg, dbeta,
        )  # fmt: skip
    if p.l2norm:
        for x, norm, dy, dx in ((q, made.q_norm, dq_norm, dq), (k, made.k_norm, dk_norm, dk)):
            if dx is not None:
                plan_norm = plan_dnorm(p, x.stride(), dx.stride())
                launch(gated_delta_rule_dnorm_kernel, plan_norm, x, norm, dy, dx)
