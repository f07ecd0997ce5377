"""Launches the kernels of a decay for each dimension of a key. `launch` allocates the results and calls this.

Forward: `channel_rows`, `channel_scores`, `channel_solve` (all chunks at once), `states` (one chunk after another),
`channel_outputs`. Backward: the same without outputs, `dstates`, `channel_pairs`, `channel_dqk`, `channel_finish`, and
`finish` for the norms.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foundry_kernels._triton.launch import launch
from foundry_kernels._triton.rows import strides_of
from foundry_kernels.ops.gated_delta_rule.triton.channel_gradients import (
    gated_delta_rule_channel_dqk_kernel,
    gated_delta_rule_channel_finish_kernel,
    gated_delta_rule_channel_pairs_kernel,
)
from foundry_kernels.ops.gated_delta_rule.triton.channels import (
    gated_delta_rule_channel_outputs_kernel,
    gated_delta_rule_channel_rows_kernel,
    gated_delta_rule_channel_scores_kernel,
    gated_delta_rule_channel_solve_kernel,
)
from foundry_kernels.ops.gated_delta_rule.triton.finish import gated_delta_rule_finish_kernel
from foundry_kernels.ops.gated_delta_rule.triton.problem import Problem, plan, plan_channels, plan_finish
from foundry_kernels.ops.gated_delta_rule.triton.states import (
    gated_delta_rule_dstates_kernel,
    gated_delta_rule_states_kernel,
)


class _Made(NamedTuple):
    """What the first kernels write; see there."""

    sums: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    q_start: Tensor
    k_start: Tensor
    k_end: Tensor
    total: Tensor
    scores: Tensor
    keys: Tensor | None
    beta: Tensor | None  # behind its gate


def _prepare(
    p: Problem, q: Tensor, k: Tensor, g: Tensor, beta: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None,
    cu_seqlens: Tensor | None, parts: int,
) -> _Made:  # fmt: skip
    g = g if g.stride(-1) == 1 else g.contiguous()
    tokens, chunks = (p.n_batch, p.n_heads, p.tokens), (p.n_batch, p.n_heads, p.n_chunks)
    norms: tuple[Tensor | None, Tensor | None] = (None, None)
    if p.l2norm:
        size = p.n_batch, p.n_kv_heads, p.tokens
        norms = q.new_empty(size, dtype=p.compute), q.new_empty(size, dtype=p.compute)
    q_start, k_start, k_end = (q.new_empty((*tokens, p.head_dim), dtype=p.compute) for _ in range(3))
    sums = q.new_empty((2, *tokens, p.head_dim), dtype=p.compute)
    total = q.new_empty((*chunks, p.head_dim), dtype=p.compute)
    scores = q.new_empty((*chunks, p.chunk, p.chunk), dtype=p.compute)
    keys = torch.empty_like(scores) if p.delta else None
    opened = None if p.beta_limit is None else q.new_empty(tokens, dtype=p.compute)
    if p.tokens:
        launch(
            gated_delta_rule_channel_rows_kernel, plan_channels("rows", p, tuple(map(strides_of, (q, k, g, beta)))),
            q, k, g, beta, A_log, dt_bias, cu_seqlens, sums, *norms, q_start, k_start, k_end, total, opened,
        )  # fmt: skip
        launch(
            gated_delta_rule_channel_scores_kernel,
            plan_channels("scores", p, tuple(map(strides_of, (q, k))), PARTS=parts),
            q, k, sums, *norms, cu_seqlens, scores, keys,
        )  # fmt: skip
    opened = beta if opened is None else opened
    return _Made(sums, *norms, q_start, k_start, k_end, total, scores, keys, opened)


def _solve(
    p: Problem, made: _Made, dout: Tensor | None, cu_seqlens: Tensor | None, inverse: Tensor | None,
    du: Tensor | None, parts: int,
) -> None:  # fmt: skip
    if p.tokens and (inverse is not None or du is not None):
        launch(
            gated_delta_rule_channel_solve_kernel,
            plan_channels("solve", p, tuple(map(strides_of, (made.beta, dout))), PARTS=parts),
            made.keys, made.scores, made.beta, dout, cu_seqlens, inverse, du,
        )  # fmt: skip


def _states(
    p: Problem, made: _Made, v: Tensor, inverse: Tensor | None, initial: Tensor | None, cu_seqlens: Tensor | None,
    final: Tensor | None, parts: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The states at the chunks' starts and the corrected values; fills `final`, if it is given."""
    states = v.new_empty((p.n_batch, p.n_heads, p.n_chunks, p.head_dim, p.head_dim_v), dtype=p.compute)
    updates = v.new_empty((p.n_batch, p.n_heads, p.tokens, p.head_dim_v), dtype=p.compute)
    strides = tuple(map(strides_of, (made.k_start, v, made.beta, initial)))
    launch(
        gated_delta_rule_states_kernel, plan("states", p, strides, PARTS=parts),
        made.k_start, v, made.beta, None, None, made.k_end, made.total, inverse, initial, cu_seqlens,
        states, updates, final,
    )  # fmt: skip
    return states, updates


def channels_fwd(
    p: Problem, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor | None,
    A_log: Tensor | None, dt_bias: Tensor | None, cu_seqlens: Tensor | None, out: Tensor, final: Tensor | None,
    inverse: Tensor | None,
) -> None:  # fmt: skip
    """Fills `out`, `final` and `inverse`."""
    parts = p.parts(out, final)
    made = _prepare(p, q, k, g, beta, A_log, dt_bias, cu_seqlens, parts)
    _solve(p, made, None, cu_seqlens, inverse, None, parts)
    states, updates = _states(p, made, v, inverse, initial, cu_seqlens, final, parts)
    if p.tokens:
        launch(
            gated_delta_rule_channel_outputs_kernel, plan_channels("outputs", p, (out.stride(),)),
            made.q_start, made.scores, states, updates, cu_seqlens, out,
        )  # fmt: skip


def channels_bwd(
    p: Problem, dout: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor | None, initial: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None,
    cu_seqlens: Tensor | None, inverse: Tensor | None, results: tuple[Tensor | None, ...],
) -> None:  # fmt: skip
    """Fills the results that are not None; those of g and beta are behind their gates."""
    dq, dk, dv, dg, dbeta, dinitial = results
    parts = p.parts(*results)
    dr = v.new_empty((p.n_batch, p.n_heads, p.tokens, p.head_dim_v), dtype=p.compute)
    made = _prepare(p, q, k, g, beta, A_log, dt_bias, cu_seqlens, parts)
    beta = made.beta
    _solve(p, made, dout, cu_seqlens, None, dr, parts)
    states, updates = _states(p, made, v, inverse, initial, cu_seqlens, None, parts)
    dstates = torch.empty_like(states)
    strides = tuple(map(strides_of, (made.q_start, made.k_start, beta, dout, dfinal)))
    launch(
        gated_delta_rule_dstates_kernel, plan("dstates", p, strides, PARTS=parts),
        made.q_start, made.k_start, beta, dout, None, None, None, made.k_end, made.total, inverse, dfinal, cu_seqlens,
        dstates, dr, dinitial,
    )  # fmt: skip
    if all(x is None for x in (dq, dk, dv, dg, dbeta)) or p.tokens == 0:
        return
    of_scores = torch.empty_like(made.scores)
    of_keys = torch.empty_like(of_scores) if p.delta else None
    launch(
        gated_delta_rule_channel_pairs_kernel,
        plan_channels("pairs", p, tuple(map(strides_of, (v, beta, dout, dv))), PARTS=parts),
        v, beta, dout, made.k_start, made.keys, states, updates, dr, cu_seqlens, of_scores, of_keys, dv, dbeta,
    )  # fmt: skip
    if all(x is None for x in (dq, dk, dg)):
        return
    dq_norm, dk_norm = dq, dk
    if p.l2norm:  # of the normalized ones
        dq_norm, dk_norm = (dx if dx is None else dx.new_empty(dx.shape, dtype=p.compute) for dx in (dq, dk))
    of_g = None if dg is None else made.sums.new_empty((3, *made.sums.shape[1:]))
    launch(
        gated_delta_rule_channel_dqk_kernel,
        plan_channels("dqk", p, tuple(map(strides_of, (q, k, beta, dout, dq_norm, dk_norm))), PARTS=parts),
        q, k, beta, dout, made.sums, made.q_norm, made.k_norm, states, updates, dstates, dr, of_scores, of_keys,
        cu_seqlens, dq_norm, dk_norm, of_g,
    )  # fmt: skip
    if dg is not None:
        launch(
            gated_delta_rule_channel_finish_kernel, plan_channels("finish", p, ()),
            of_g, made.total, states, dstates, cu_seqlens, dg,
        )  # fmt: skip
    if p.l2norm and (dq is not None or dk is not None):
        launch(
            gated_delta_rule_finish_kernel, plan_finish(p, tuple(map(strides_of, (q, k, None, dq, dk)))),
            None, q, k, None, made.q_norm, made.k_norm, dq_norm, dk_norm, cu_seqlens, None, None, dq, dk,
        )  # fmt: skip
