"""Sums over the rows of attention, by head: from a kernel's statistics, from queries and keys, or from scores.

Queries and scores are read in blocks of rows, so that nothing here has the size T x S.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.flash_attention.attention_mask import TILE, dense

#: Scores in a block of rows.
_BLOCK = 2**21
#: A score below this means that the query does not see the key: models use large finite numbers for minus infinity.
_HIDDEN = -1e8


@dataclass
class Rows:
    """Attributes: `entropy` ``[H]``, the sum over all rows in nats; `most` ``[H]``, the sum of the largest possible
    entropies, the logarithms of the numbers of visible keys; `max_logit` ``[H]``. They are float32 or float64."""

    entropy: Tensor
    most: Tensor
    max_logit: Tensor

    def __add__(self, other: Rows) -> Rows:
        largest = torch.maximum(self.max_logit, other.max_logit)
        return Rows(self.entropy + other.entropy, self.most + other.most, largest)

    def fraction(self) -> Tensor:
        """[H]: the entropy as a fraction of the largest one; 1 if no row sees more than one key."""
        found = self.entropy / self.most.clamp_min(math.ulp(1.0))
        return found.clamp_min(0.0).masked_fill(self.most == 0, 1.0)


def of_scores(scores: Tensor, sinks: Tensor | None = None) -> Rows:
    """Statistics of logits ``[B, H, T, S]``, with hidden keys at minus infinity or far below 0, and of sinks ``[B, H,
    T, 1]``."""
    found = []
    for first, last in _blocks(scores.shape):
        found.append(_of_block(scores[:, :, first:last], None if sinks is None else sinks[:, :, first:last]))
    return _sum(found, scores)


def of_queries(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, scale: float | None) -> Rows:
    """Statistics of SDPA's q ``[B, H, T, D]`` and k ``[B, Hk, S, D]``, with its mask (bool with True for visible, or
    floating and added)."""
    b, h, t, d = q.shape
    s = k.shape[2]
    wide = wide_dtype(q.dtype)
    keys, scale = k.to(wide).mT, d**-0.5 if scale is None else scale
    found = []
    for first, last in _blocks((b, h, t, s)):
        folded = q[:, :, first:last].to(wide).reshape(b, k.shape[1], -1, d)
        scores = (folded @ keys).view(b, h, -1, s) * scale
        if mask is not None:
            part = mask if mask.shape[-2] == 1 else mask[..., first:last, :]
            scores = scores.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else scores + part
        if causal:
            behind = torch.arange(s, device=q.device) > torch.arange(first, last, device=q.device)[:, None]
            scores = scores.masked_fill(behind, -torch.inf)
        found.append(_of_block(scores))
    return _sum(found, q)


def of_kernel(entropy: Tensor, max_logit: Tensor, shape: tuple[int, int, int, int], options: Any) -> Rows:
    """Statistics from a kernel's ``[B, H, T]``, or ``[H, total]`` for packed sequences, in a call with these
    AttentionOptions. `shape` is (B, H, T, S) of the scores, or (1, H, total_q, total_k)."""
    if entropy.dim() == 2:
        entropy, max_logit = entropy[None], max_logit[None]
        seen = _seen_packed(shape[2], options)
    else:
        seen = _seen(shape, options, entropy.device)
    counts = seen + (options.sinks is not None)
    most = counts.clamp_min(1).to(entropy.dtype).log().expand_as(entropy)
    return Rows(entropy.sum((0, 2)), most.sum((0, 2)), _largest(max_logit))


def _blocks(shape: Any) -> Iterator[tuple[int, int]]:
    b, h, t, s = shape
    step = max(1, _BLOCK // max(1, b * h * s))
    return ((first, min(first + step, t)) for first in range(0, t, step))


def _of_block(scores: Tensor, sinks: Tensor | None = None) -> Rows:
    wide = wide_dtype(scores.dtype)
    hidden = scores <= max(_HIDDEN, torch.finfo(scores.dtype).min / 2)
    seen = scores.to(wide).masked_fill(hidden, -torch.inf)
    counts = (~hidden).sum(-1)
    largest = seen.amax(-1) if seen.shape[-1] else seen.new_full(seen.shape[:-1], -torch.inf)
    if sinks is not None:
        seen, counts = torch.cat([seen, sinks.to(wide)], -1), counts + 1
    logs = seen.masked_fill((counts == 0)[..., None], 0.0).log_softmax(-1)
    entropy = -(logs.exp() * logs.masked_fill(logs == -torch.inf, 0.0)).sum(-1).masked_fill(counts == 0, 0.0)
    most = counts.clamp_min(1).to(wide).log()
    return Rows(entropy.sum((0, 2)), most.sum((0, 2)), _largest(largest))


def _sum(found: list[Rows], like: Tensor) -> Rows:
    if not found:
        zero = torch.zeros(like.shape[1], device=like.device, dtype=wide_dtype(like.dtype))
        return Rows(zero, zero, zero - torch.inf)
    total = found[0]
    for rows in found[1:]:
        total = total + rows
    return total


def _largest(max_logit: Tensor) -> Tensor:
    if max_logit.shape[0] == 0 or max_logit.shape[2] == 0:
        return max_logit.new_full(max_logit.shape[1:2], -torch.inf)
    return max_logit.amax((0, 2))


def _window(positions: Tensor, keys: Tensor | int, options: Any) -> tuple[Tensor, Tensor]:
    """The first key that each position sees, and one past the last; positions are aligned with the keys'."""
    left, right = options.window_left, options.window_right
    first = torch.zeros_like(positions) if left is None else positions - left
    last = torch.zeros_like(positions) + keys if right is None else positions + right + 1
    return first.clamp_min(0), torch.minimum(last, torch.zeros_like(last) + keys)


def _seen(shape: tuple[int, int, int, int], options: Any, device: torch.device) -> Tensor:
    """The number of keys that each query sees, broadcastable to ``[B, H, T]``."""
    _, _, t, s = shape
    positions = torch.arange(t, device=device) + (s - t if options.bottom_right else 0)
    first, last = _window(positions, s, options)
    if options.attn_mask is None and options.mask_tiles is None:
        return (last - first).clamp_min(0)
    keys, found = torch.arange(s, device=device), []
    for begin in range(0, t, TILE):
        rows = slice(begin, min(begin + TILE, t))
        seen = (keys >= first[rows, None]) & (keys < last[rows, None])
        if options.mask_tiles is not None:
            tiles = options.mask_tiles
            tiles = tiles if tiles.shape[2] == 1 else tiles[:, :, begin // TILE : begin // TILE + 1]
            seen = seen & dense(tiles, options.mask_bits, rows.stop - begin, s)
        if options.attn_mask is not None:
            mask = options.attn_mask if options.attn_mask.shape[2] == 1 else options.attn_mask[:, :, rows]
            seen = seen & (mask if mask.dtype == torch.bool else mask > max(_HIDDEN, torch.finfo(mask.dtype).min / 2))
        found.append(seen.sum(-1))
    return torch.cat(found, -1) if found else torch.zeros(t, device=device)


def _seen_packed(total: int, options: Any) -> Tensor:
    """[total]: the same for packed sequences; 0 for rows after the last one."""
    cu_q, cu_k = options.cu_seqlens_q.long(), options.cu_seqlens_k.long()
    if len(cu_q) == 1:
        return torch.zeros(total, device=cu_q.device)
    rows = torch.arange(total, device=cu_q.device)
    sequence = torch.searchsorted(cu_q[1:].contiguous(), rows, right=True)
    inside, sequence = sequence < len(cu_q) - 1, sequence.clamp_max(len(cu_q) - 2)
    keys = cu_k.diff()[sequence]
    positions = rows - cu_q[sequence] + (keys - cu_q.diff()[sequence] if options.bottom_right else 0)
    first, last = _window(positions, keys, options)
    return ((last - first).clamp_min(0) * inside).to(torch.int64)
