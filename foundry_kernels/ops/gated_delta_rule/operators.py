"""The autograd function around the two operators of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.gated_delta_rule import columns
from foundry_kernels.ops.gated_delta_rule.options import DeltaRuleOptions

#: `states` is what the backward operator needs of each chunk: from C++ the states at the chunks' starts, ``[B, H_v,
#: n_chunks, D_k, D_v]``; from Triton the inverses of their triangles. Empty without `save_states`.
FWD = (
    "gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? initial_state, "
    f"Tensor? A_log, Tensor? dt_bias, {DeltaRuleOptions.SCHEMA}, bool need_final_state, bool save_states) "
    "-> (Tensor out, Tensor final_state, Tensor states)"
)
#: A gradient that is not needed is an empty tensor.
BWD = (
    "gated_delta_rule_bwd(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, "
    f"Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, Tensor states, {DeltaRuleOptions.SCHEMA}, "
    "bool need_dq, bool need_dk, bool need_dv, "
    "bool need_dg, bool need_dbeta, bool need_dinitial_state, bool need_dA_log, bool need_ddt_bias) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dinitial_state, Tensor dA_log, "
    "Tensor ddt_bias)"
)
STEP = (
    "gated_delta_rule_step(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor(a!) state, "
    "Tensor? A_log, Tensor? dt_bias, float scale, bool qk_l2norm, float? beta_limit) -> Tensor out"
)

#: The forward and the backward operator by the prefix of their names, which torch.compile can look up.
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def chunks_of(tokens: int, chunk_length: int, n_documents: int | None) -> int:
    """The number of chunks of a sequence, or a bound of it for that many packed documents."""
    if n_documents is None:
        return (tokens + chunk_length - 1) // chunk_length
    return tokens // chunk_length + n_documents


def make_backend(
    prefix: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The backend's function, from its operators, whose schemas are `FWD` and `BWD`."""
    _OPERATORS[prefix] = forward, backward

    def gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor | None,
        beta: Tensor | None,
        initial_state: Tensor | None,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        options: DeltaRuleOptions,
    ) -> tuple[Tensor, Tensor | None]:
        tensors = q, k, v, g, beta, initial_state, A_log, dt_bias
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
            out, final = apply(_DeltaRule, prefix, options, *tensors)
        else:
            call = options.operator_args()
            out, final, _ = columns.forward(forward, tensors, call, options.return_final_state, False)
        return out, final if options.return_final_state else None

    return gated_delta_rule


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prefix: str, options: DeltaRuleOptions, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.prefix, ctx.options = prefix, options._replace(cu_seqlens=None)
        call = options.operator_args()
        out, final, states = columns.forward(_OPERATORS[prefix][0], tensors, call, options.return_final_state, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, options.cu_seqlens, *states)
        if not any(ctx.needs_input_grad[3:]):  # the state depends on no query
            ctx.mark_non_differentiable(final)
        return out, final

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> Any:
        refuse_second_derivative("gated_delta_rule")
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
        tensors, (cu_seqlens, *states) = saved[:8], saved[8:]
        if dout is None:
            dout = torch.zeros_like(tensors[2])
        if not ctx.options.return_final_state:
            dfinal = None  # torch.compile materializes the gradients of results that nobody gets
        options = ctx.options._replace(cu_seqlens=cu_seqlens).operator_args()
        needs = ctx.needs_input_grad[2:]
        grads = columns.backward(_OPERATORS[ctx.prefix][1], dout, dfinal, tensors, states, options, needs)
        return None, None, *(dx if need else None for dx, need in zip(grads, needs, strict=True))
