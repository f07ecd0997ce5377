"""Attention in Triton: the operators and their gradient. `launch` has what is launched for which call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels._triton.operators import define, refuse_second_derivative
from foundry_kernels.ops.flash_attention.options import SCHEMA, AttentionOptions, from_operator_args, refuse_others
from foundry_kernels.ops.flash_attention.triton.backward_launch import launch_bwd
from foundry_kernels.ops.flash_attention.triton.launch import empty_bwd, empty_fwd, fake_rows, launch_fwd

#: The options that this backend serves, in the order of the fields.
SERVED = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "scale", "window_left", "window_right", "softcap",
    "alibi_slopes", "sinks", "bottom_right", "deterministic", "return_lse", "return_stats",
)  # fmt: skip


def _fwd(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    options, (save_lse, save_stats) = from_operator_args(args)
    return launch_fwd(q, k, v, options, save_lse, save_stats)


def _fake_fwd(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor | None, ...]:
    options, (save_lse, save_stats) = from_operator_args(args)
    return empty_fwd(q, v, options, save_lse, save_stats, fake_rows)


def _bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor | None, ...]:
    options, need = from_operator_args(args)
    return launch_bwd(dout, dlse, q, k, v, out, lse, options, *need)


def _fake_bwd(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *args: Any
) -> tuple[Tensor | None, ...]:
    options, (need_dq, need_dk, need_dv, need_dsinks) = from_operator_args(args)
    return empty_bwd(q, k, v, options, need_dq, need_dk, need_dv, need_dsinks, fake_rows)


flash_attention_fwd = define(
    f"triton_flash_attention_fwd(Tensor q, Tensor k, Tensor v, {SCHEMA}, bool save_lse, bool save_stats) "
    "-> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)",
    _fwd,
    _fake_fwd,
)
flash_attention_bwd = define(
    "triton_flash_attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{SCHEMA}, bool need_dq, bool need_dk, bool need_dv, bool need_dsinks) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)",
    _bwd,
    _fake_bwd,
)


def _returned(lse: Tensor, q: Tensor) -> Tensor:
    """lse in the dtype that the caller gets."""
    return lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


class _FlashAttention(torch.autograd.Function):
    """Returns a tuple of what is wanted. The sinks are an argument of their own, since autograd does not look for
    tensors inside of `options`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, options: AttentionOptions) -> Any:
        ctx.set_materialize_grads(False)  # zeros would cost a pass, and are no DTensor where the outputs are
        if sinks is not None:
            options = options._replace(sinks=sinks)
        save_lse = True
        out, lse, entropy, max_logit = flash_attention_fwd(
            q, k, v, *options.operator_args(), save_lse, options.return_stats
        )
        ctx.save_for_backward(q, k, v, out, lse, *options.tensors())
        ctx.options = options.without_tensors()
        if options.return_lse:
            lse = _returned(lse, q)
            if not (q.requires_grad or k.requires_grad or (sinks is not None and sinks.requires_grad)):  # never on v
                ctx.mark_non_differentiable(lse)
        if options.return_stats:
            ctx.mark_non_differentiable(entropy, max_logit)
        results = options.select(out, lse, entropy, max_logit)
        return results if isinstance(results, tuple) else (results,)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, *dstats: None) -> Any:
        """Without lse a statistic is the second result, and its gradient, None, arrives as `dlse`."""
        refuse_second_derivative("flash_attention")
        if dout is None and dlse is None:
            return None, None, None, None, None
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        options = ctx.options.with_tensors(tensors)
        need_dq, need_dk, need_dv, need_dsinks, _ = ctx.needs_input_grad
        if dout is None:
            dout, need_dv = torch.zeros_like(out), False  # lse does not depend on v
        dq, dk, dv, dsinks = flash_attention_bwd(
            dout, dlse, q, k, v, out, lse, *options.operator_args(), need_dq, need_dk, need_dv, need_dsinks
        )
        return (
            dq if need_dq else None,
            dk if need_dk else None,
            dv if need_dv else None,
            dsinks if need_dsinks else None,
            None,
        )


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | tuple[Tensor, ...]:
    refuse_others(options, SERVED, "triton")
    sinks = options.sinks
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or (sinks is not None and sinks.requires_grad)
    ):
        bare = options if sinks is None else options._replace(sinks=None)
        results = _FlashAttention.apply(q, k, v, sinks, bare)
        return results if len(results) > 1 else results[0]
    out, lse, entropy, max_logit = flash_attention_fwd(
        q, k, v, *options.operator_args(), options.return_lse, options.return_stats
    )
    if options.return_lse:
        lse = _returned(lse, q)
    return options.select(out, lse, entropy, max_logit)


flash_attention_varlen = flash_attention
