"""The weights of attention, for whoever wants to look at them: from the scores and the lse that the fused pass returns.

.. math:: w_{ij} = z_{ij} \\, e^{s_{ij} - \\ell_i}

in the notation of the operation. It is the matrix that the kernels never make: ``[B, H, T, S]``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.flash_attention.checks import make_options
from foundry_kernels.ops.flash_attention.dropout import keep_mask, keep_scale
from foundry_kernels.ops.flash_attention.reference import scores, weighted


def through_weights(out: Tensor, weights: Tensor, v: Tensor) -> Tensor:
    """Returns the output of a call, whose gradient then goes through its weights, and so reaches them too.

    Args:
        out: ``[B, H, T, Dv]``. weights: ``[B, H, T, S]``, of :func:`attention_weights`. v: ``[B, Hk, S, Dv]``.
    """
    again = weighted(weights, v)
    return again + (out - again).detach()


def attention_weights(q: Tensor, k: Tensor, lse: Tensor, **options: Any) -> Tensor:
    """The weights by which ``flash_attention(q, k, v, return_lse=True, **options)`` summed the values.

    Args:
        q: ``[B, H, T, D]``. k: ``[B, Hk, S, D]``.
        lse: ``[B, H, T]``, as that call returned it.
        options: those of the call, but for `backend`, `return_lse` and `return_stats`. With `dropout_p` the seed must
            be given to both.

    Returns:
        ``[B, H, T, S]`` of q's dtype: each row sums to 1 (less what a sink takes), or is 0 where the query sees no key;
        with dropout, a weight is 0 or divided by what remains, as in the sum. It is differentiable. Two such matrices
        of float32 (float64 for float64) exist on the way.

    Raises:
        ValueError: `dropout_p` without `dropout_seed`; and as :func:`foundry_kernels.flash_attention`.
    """
    if options.get("dropout_p") and options.get("dropout_seed") is None:
        raise ValueError("dropout_seed must be given, which dropped the weights of the call; got None")
    wide = wide_dtype(q.dtype)
    made = make_options(q, None, None, q.shape[2], k.shape[2], **options)
    logits = scores(q.to(wide), k.to(wide), made)
    seen = lse.to(wide).masked_fill(lse == -torch.inf, 0.0)  # a row of -inf has weights 0, and no gradient of NaN
    weights = torch.exp(logits - seen[..., None])
    if made.dropout_p is not None and made.dropout_seed is not None:
        kept = keep_mask((*q.shape[:3], k.shape[2]), made.dropout_p, made.dropout_seed, made.dropout_heads)
        weights = weights * (kept * keep_scale(made.dropout_p)).to(wide)
    return weights.to(q.dtype)
