"""Attention in Triton: the operators and their gradient. `launch` launches the kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from foundry_kernels._triton.operators import apply, define, requires_grad
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.ops.flash_attention.score_program.gradients import split_dscore
from foundry_kernels.ops.flash_attention.triton.backward_launch import launch_bwd
from foundry_kernels.ops.flash_attention.triton.launch import empty_bwd, empty_fwd, fake_rows, launch_fwd, refuse_wide

flash_attention_fwd = define(
    f"triton_flash_attention_fwd(Tensor q, Tensor k, Tensor v, {AttentionOptions.SCHEMA}, "
    "bool save_lse, bool save_stats) -> (Tensor out, Tensor lse, Tensor entropy, Tensor max_logit)",
    launch_fwd,
    partial(empty_fwd, rows=fake_rows),
    AttentionOptions,
)
flash_attention_bwd = define(
    "triton_flash_attention_bwd(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    f"{AttentionOptions.SCHEMA}, bool need_dq, bool need_dk, bool need_dv, bool need_dsinks, bool need_dbias, "
    "int[] dscore_slots) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks, Tensor dbias, Tensor dscore)",
    launch_bwd,
    partial(empty_bwd, rows=fake_rows),
    AttentionOptions,
)


def _returned(lse: Tensor, q: Tensor) -> Tensor:
    """lse in the dtype that the caller gets."""
    return lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


class _FlashAttention(torch.autograd.Function):
    """Returns a tuple of the requested results. The sinks, the mask and score_mod's tensors are separate arguments,
    since autograd does not look for tensors in `options`."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, attn_mask: Tensor | None,
        options: AttentionOptions, *score_tensors: Tensor,
    ) -> Any:  # fmt: skip
        ctx.set_materialize_grads(False)  # zeros would cost a pass, and are no DTensors where the outputs are
        if sinks is not None or attn_mask is not None or score_tensors:
            options = options._replace(sinks=sinks, attn_mask=attn_mask, score_tensors=score_tensors or None)
        save_lse = True
        out, lse, entropy, max_logit = flash_attention_fwd(q, k, v, options, save_lse, options.return_stats)
        given = options.tensors() if options.has_tensors() else ()
        ctx.save_for_backward(q, k, v, out, lse, *given)
        ctx.options = options.without_tensors()
        if options.return_lse:
            lse = _returned(lse, q)
            reaching = (q, k, sinks, attn_mask, *score_tensors)  # never v
            if not any(x is not None and x.requires_grad for x in reaching):
                ctx.mark_non_differentiable(lse)
        if options.return_stats:
            ctx.mark_non_differentiable(entropy, max_logit)
        results = options.select(out, lse, entropy, max_logit)
        return results if isinstance(results, tuple) else (results,)

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, *dstats: None) -> Any:
        """Returns the gradients. If lse is not returned, a statistic is the second result, and its gradient, None, is
        `dlse`."""
        refuse_second_derivative("flash_attention")
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, lse, *tensors = ctx.saved_tensors
        options = ctx.options.with_tensors(tensors) if tensors else ctx.options
        need_dq, need_dk, need_dv, need_dsinks, need_dbias, _, *need_dscore = ctx.needs_input_grad
        dscore_slots = tuple([slot for slot, needed in enumerate(need_dscore) if needed])
        if dout is None:
            dout, need_dv = torch.zeros_like(out), False  # lse does not depend on v
        dq, dk, dv, dsinks, dbias, dscore = flash_attention_bwd(
            dout, dlse, q, k, v, out, lse, options, need_dq, need_dk, need_dv, need_dsinks, need_dbias, dscore_slots
        )
        return (
            dq if need_dq else None,
            dk if need_dk else None,
            dv if need_dv else None,
            dsinks if need_dsinks else None,
            dbias if need_dbias else None,
            None,
            *(split_dscore(dscore, options.score_tensors, dscore_slots) if options.score_tensors else ()),
        )


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | tuple[Tensor, ...]:
    options.refuse_others(AttentionOptions._fields, "flash_attention", "triton")
    sinks, attn_mask, score_tensors = options.sinks, options.attn_mask, options.score_tensors or ()
    backward = requires_grad(q, k, v, sinks, attn_mask, *score_tensors)
    refuse_wide(q, v, backward)
    if backward:
        bare = options
        if sinks is not None or attn_mask is not None or score_tensors:
            bare = options._replace(sinks=None, attn_mask=None, score_tensors=None)
        results = apply(_FlashAttention, q, k, v, sinks, attn_mask, bare, *score_tensors)
        return results if len(results) > 1 else results[0]
    out, lse, entropy, max_logit = flash_attention_fwd(q, k, v, options, options.return_lse, options.return_stats)
    if options.return_lse:
        lse = _returned(lse, q)
    return options.select(out, lse, entropy, max_logit)


flash_attention_varlen = flash_attention
