"""flash-attn's third result, computed from the lse of the fused pass: the weights, whose sign shows what dropout
kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core import dropout
from foundry_kernels.ops.flash_attention import Options
from foundry_kernels.ops.flash_attention.dropout import keep_mask
from foundry_kernels.ops.flash_attention.weights import attention_weights


def with_seed(q: Tensor, options: Options) -> Options:
    """The options with a dropout seed, drawn as attention itself would draw it, so that its mask can be recomputed."""
    drop = dropout.arguments(q, options["dropout_p"], None, "q")
    return options | {"dropout_seed": drop[1]} if drop else options


@torch.no_grad()
def dense_probs(q: Tensor, k: Tensor, lse: Tensor, options: Options, sequence: int = 0) -> Tensor | None:
    """``[B, H, T, S]`` of q's dtype, or None without dropout, as in flash-attn: the softmax, with negative sign where a
    weight was dropped.

    q is ``[B, H, T, D]``, k ``[B, Hk, S, D]``; `sequence` is the number of the first of the B.
    """
    p, seed = options["dropout_p"], options.get("dropout_seed")
    if not isinstance(seed, Tensor):
        return None
    apart = ("dropout_p", "dropout_seed", "deterministic", "backend")
    rest: dict[str, Any] = {name: value for name, value in options.items() if name not in apart}
    weights = attention_weights(q, k, lse, **rest)
    batch, head = (torch.arange(n, device=q.device) for n in q.shape[:2])
    kept = keep_mask(weights.shape, p, seed, (batch[:, None] + sequence << 32) + head)  # type: ignore[arg-type]
    return torch.where(kept, weights, -weights).to(q.dtype)


@torch.no_grad()
def packed_probs(
    q: Tensor, k: Tensor, lse: Tensor, cu_seqlens: tuple[Tensor, Tensor], max_seqlens: tuple[int, int], options: Options
) -> Tensor | None:
    """``[B, H, max_seqlen_q, max_seqlen_k]``, each sequence in the first rows and columns and 0 elsewhere; q is
    ``[total_q, H, D]``, k ``[total_k, Hk, D]``. It reads the lengths."""
    if "dropout_seed" not in options:
        return None
    ends_q, ends_k = (x.tolist() for x in cu_seqlens)
    slopes = options["alibi_slopes"]
    probs = q.new_zeros(len(ends_q) - 1, q.shape[1], *max_seqlens)
    for n in range(len(ends_q) - 1):
        of_q, of_k = slice(*ends_q[n : n + 2]), slice(*ends_k[n : n + 2])
        own = options | {"alibi_slopes": slopes[n : n + 1] if slopes is not None and slopes.dim() == 2 else slopes}
        qn, kn = q[of_q].transpose(0, 1)[None], k[of_k].transpose(0, 1)[None]
        found = dense_probs(qn, kn, lse[None, :, of_q], own, n)
        assert found is not None
        probs[n, :, : found.shape[2], : found.shape[3]] = found[0]
    return probs
