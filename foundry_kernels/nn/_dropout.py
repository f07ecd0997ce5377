"""Attention with dropout of its weights, in plain PyTorch: no kernel has it yet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    *,
    causal: bool,
    window: tuple[int | None, int | None] | None = None,
    alibi_slopes: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """:func:`foundry_kernels.flash_attention` of q ``[B, H, T, D]`` and k, v ``[B, Hk, S, D]``, each of whose weights
    is 0 with the probability `dropout_p` and else divided by ``1 - dropout_p``. A matrix ``[B, H, T, S]`` is in memory.

    Args:
        cu_seqlens: ``[N + 1]``: the one row of the batch holds N packed sequences (T = S), which see no other's keys.
    """
    batch, heads, length, width = q.shape
    keys = k.shape[2]
    q_pos = torch.arange(keys - length, keys, device=q.device)[:, None]
    rel_pos = torch.arange(keys, device=q.device) - q_pos
    left, right = (None, None) if window is None else window
    seen = torch.ones_like(rel_pos, dtype=torch.bool)
    if causal:
        seen = seen & (rel_pos <= 0)
    if left is not None:
        seen = seen & (rel_pos >= -left)
    if right is not None:
        seen = seen & (rel_pos <= right)
    if cu_seqlens is not None:
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(keys, device=q.device), right=True)
        seen = seen & (sequence[:, None] == sequence)
    groups = heads // k.shape[1]
    # As the reference does it: products in the inputs' dtype, all between them in float32 at least.
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    folded = q.reshape(batch, k.shape[1], groups * length, width)
    scores = (folded @ k.mT).view(batch, heads, length, keys).to(compute) * width**-0.5
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.to(compute)[:, None, None] * rel_pos.abs()
    weights = F.dropout(scores.masked_fill(~seen, -torch.inf).softmax(-1), dropout_p)
    out = weights.to(v.dtype).view(batch, k.shape[1], groups * length, keys) @ v
    return out.view(batch, heads, length, v.shape[3])
