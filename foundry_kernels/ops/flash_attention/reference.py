"""Plain PyTorch, differentiated by autograd: what every kernel of the op must equal.

In bfloat16 and float16 both matrix products take and give that dtype and all between them is in float32, which is what
a model without a fused kernel computes. `q` is folded to ``[B, Hk, G*T, D]`` so that no key or value is repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels._layout import inverse, storage_order


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bottom_right: bool,
    return_lse: bool,
    return_stats: bool,
) -> Tensor | tuple[Tensor, ...]:
    distance = None
    if alibi_slopes is not None or left is not None or right is not None:
        t, s = q.shape[2], k.shape[2]
        i = torch.arange(t, device=q.device) + (s - t if bottom_right else 0)
        distance = torch.arange(s, device=q.device) - i[:, None]
    slopes = None if alibi_slopes is None else alibi_slopes[..., None, None]
    out, *rows = _attend(q, k, v, scale, softcap, sinks, distance, _outside(distance, left, right), slopes)
    order = storage_order(q)
    return _wanted(out.permute(order).contiguous().permute(inverse(order)), rows, return_lse, return_stats)


def _wanted(out: Tensor, rows: list[Tensor], return_lse: bool, return_stats: bool) -> Tensor | tuple[Tensor, ...]:
    """What the caller asked for of `out` and `rows`: lse, entropy, max_logit."""
    kept = (rows[:1] if return_lse else []) + (rows[1:] if return_stats else [])
    return (out, *kept) if kept else out


def _outside(distance: Tensor | None, left: int | None, right: int | None) -> Tensor | None:
    """Which keys lie outside of the window; `distance` is how far key j lies ahead of query i, ``j - (i + offset)``."""
    if distance is None or (left is None and right is None):
        return None
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if left is not None:
        hidden = hidden | (distance < -left)
    if right is not None:
        hidden = hidden | (distance > right)
    return hidden


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
    distance: Tensor | None,
    hidden: Tensor | None,
    slopes: Tensor | None,
) -> tuple[Tensor, ...]:
    """(out, lse, entropy, max_logit); `distance` and `hidden` are ``[T, S]``, slopes broadcast to ``[B, H, T, S]``."""
    b, h, t, d = q.shape
    hk, s, dv = k.shape[1], k.shape[2], v.shape[3]
    rows = (h // hk) * t
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    scores = torch.matmul(q.reshape(b, hk, rows, d), k.transpose(-1, -2)).view(b, h, t, s).to(compute) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        assert distance is not None
        scores = scores - slopes.to(compute) * distance.abs()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    probabilities, *per_row = _softmax(scores, sinks)
    probabilities = probabilities.to(v.dtype).view(b, hk, rows, s)
    return (torch.matmul(probabilities, v).view(b, h, t, dv), *per_row)


def _softmax(scores: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Softmax of ``[B, H, T, S]`` over the last dimension with a sink a head, and of each row ``[B, H, T]`` its
    log-sum-exp and, outside of autograd, its entropy and largest score.

    A row of -inf gives probabilities 0 and lse -inf. Every value that is not finite is replaced before the function
    whose derivative it would spoil, since autograd multiplies the masked branch of a `where` by 0 and 0 * inf is NaN.
    """
    peak = scores.detach().new_full((*scores.shape[:-1], 1), -torch.inf)
    if scores.shape[-1] > 0:
        peak = scores.detach().amax(-1, keepdim=True)
    largest, empty = peak, peak == -torch.inf
    if sinks is not None:
        logit = sinks.to(scores.dtype)[:, None, None]
        peak = torch.maximum(peak, logit.detach())
    peak = peak.masked_fill(empty, 0.0)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp((logit - peak).masked_fill(empty, -torch.inf))
    total = total.masked_fill(empty, 1.0)
    lse = (peak + torch.log(total)).masked_fill(empty, -torch.inf)
    with torch.no_grad():  # sum of p (s - peak): no number in it is large, and the weight of -inf counts as 0
        mean = (weights * (scores - peak).masked_fill(weights == 0, 0.0)).sum(-1, keepdim=True)
        if sinks is not None:
            below = (logit - peak).masked_fill(empty, 0.0)
            mean = mean + torch.exp(below).masked_fill(empty, 0.0) * below
        entropy = torch.log(total) - mean / total
    return weights / total, lse.squeeze(-1), entropy.squeeze(-1), largest.squeeze(-1)


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bottom_right: bool,
    return_lse: bool,
    return_stats: bool,
) -> Tensor | tuple[Tensor, ...]:
    options = (scale, left, right, softcap, alibi_slopes, sinks, bottom_right)
    attend = _in_one_matrix if torch.compiler.is_compiling() else _one_by_one
    out, *rows = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, *options)
    return _wanted(out.contiguous(), [x.contiguous() for x in rows], return_lse, return_stats)


def _one_by_one(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bottom_right: bool,
) -> tuple[Tensor, ...]:
    """Each sequence by itself: the least work, but the lengths must be read."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    if len(starts_q) == 1:  # no sequence: one without tokens keeps the result on the graph
        starts_q, starts_k, alibi_slopes = [0, 0], [0, 0], None
    found = []
    for n in range(len(starts_q) - 1):
        tokens_q, tokens_k = slice(starts_q[n], starts_q[n + 1]), slice(starts_k[n], starts_k[n + 1])
        qn, kn, vn = (x.transpose(0, 1).unsqueeze(0) for x in (q[tokens_q], k[tokens_k], v[tokens_k]))
        slopes = alibi_slopes[n] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        out, *rows = flash_attention(qn, kn, vn, scale, left, right, softcap, slopes, sinks, bottom_right, True, True)
        found.append((out.squeeze(0).transpose(0, 1), *(x.squeeze(0) for x in rows)))
    out, *rows = (list(x) for x in zip(*found, strict=True))
    return (torch.cat(out), *(torch.cat(x, dim=1) for x in rows))


def _in_one_matrix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bottom_right: bool,
) -> tuple[Tensor, ...]:
    """All sequences as one with the pairs of different ones hidden: nothing is read, so torch.compile can trace it."""
    index_q = torch.arange(q.shape[0], device=q.device)
    index_k = torch.arange(k.shape[0], device=q.device)
    sequence_q = torch.searchsorted(cu_seqlens_q[1:], index_q, right=True)
    sequence_k = torch.searchsorted(cu_seqlens_k[1:], index_k, right=True)
    place_q = index_q - cu_seqlens_q[sequence_q]
    if bottom_right:
        place_q = place_q + (cu_seqlens_k.diff() - cu_seqlens_q.diff())[sequence_q]
    distance = index_k - cu_seqlens_k[sequence_k] - place_q[:, None]
    hidden = sequence_q[:, None] != sequence_k
    outside = _outside(distance, left, right)
    if outside is not None:
        hidden = hidden | outside
    slopes = alibi_slopes
    if slopes is not None:
        slopes = slopes[:, None, None] if slopes.dim() == 1 else slopes[sequence_q].t()[..., None]
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out, *rows = _attend(q, k, v, scale, softcap, sinks, distance, hidden, slopes)
    return (out.squeeze(0).transpose(0, 1), *(x.squeeze(0) for x in rows))
