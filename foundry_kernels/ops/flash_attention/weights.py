"""The weights of attention as a matrix, for those who look at them: from the log-sum-exp of the fused call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autocast import autocast_dtype, no_autocast
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.flash_attention import reference
from foundry_kernels.ops.flash_attention.checks import dense_options
from foundry_kernels.ops.flash_attention.dropout import keep_mask, keep_scale


def through_weights(out: Tensor, weights: Tensor, v: Tensor) -> Tensor:
    """Returns the output of a call, whose gradient then goes through its weights, and so reaches them too.

    Args:
        out: ``[B, H, T, Dv]``. weights: ``[B, H, T, S]``, of :func:`attention_weights`. v: ``[B, Hk, S, Dv]``.
    """
    again = reference.weighted(weights, v)
    return again + (out - again).detach()


def attention_weights(q: Tensor, k: Tensor, lse: Tensor, *, rounded: bool = False, **options: Any) -> Tensor:
    """The weights ``exp(scores - lse)`` that a call of :func:`flash_attention` multiplied its values by.

    Args:
        q: ``[B, H, T, D]``, the queries of that call.
        k: ``[B, Hk, S, D]``, its keys.
        lse: ``[B, H, T]``, what it returned with ``return_lse=True``.
        rounded: whether that call rounded its scores to q's dtype, as the reference does and kernels do not.
        options: its other keyword arguments. With dropout the seed must be given; dropped weights are 0.

    Returns:
        ``[B, H, T, S]``, float32 (float64 for float64 queries); a query that sees no key has weights 0. Gradients reach
        q, k and a bias, through lse too.

    Raises:
        ValueError: `dropout_p` without `dropout_seed`; TypeError, ValueError: an option is not as for
            :func:`flash_attention`.

    This is plain PyTorch: two matrices of this size exist at a time (more with dropout), and one is kept for the
    backward pass.
    """
    if options.get("dropout_p") and options.get("dropout_seed") is None:
        raise ValueError("dropout_seed must be that of the call with dropout_p; got None")
    dtype, wide = autocast_dtype(q) or q.dtype, wide_dtype(q.dtype)
    with no_autocast(q):
        q, k = q.to(dtype), k.to(dtype)
        if not rounded:
            q, k = q.to(wide), k.to(wide)
        made = dense_options(q, k, **options)
        scores, at = reference.scores(q, k, made), lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
        with torch.no_grad():  # the rounding error of lse, which beside a large bias has lost the number of keys
            total = (scores - at).exp_().sum(-1, keepdim=True)
            if made.sinks is not None:
                total += torch.exp(made.sinks.to(wide)[:, None, None] - at)
            lost = total.log_().masked_fill_(lse[..., None] == -torch.inf, 0.0)
        # In place: there is no other reference to the scores, and no backward pass needs them.
        weights = scores.sub_(at).sub_(lost).exp_()
        if made.dropout_p is not None and made.dropout_seed is not None:
            kept = keep_mask((*q.shape[:3], k.shape[2]), made.dropout_p, made.dropout_seed, made.dropout_heads)
            weights = weights * (kept * keep_scale(made.dropout_p))
        return weights
