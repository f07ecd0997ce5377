"""Importance weights, by their logarithms, and estimates of the KL divergence."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foundry_kernels.losses.tokens import Tokens


def level_of(each: Tensor, tokens: Tokens, level: str, loss_type: str) -> Tensor:
    """The logarithm of the importance weights, ``[B, T]`` or ``[B, 1]``."""
    if loss_type == "rloo":
        return each.sum(-1, keepdim=True)
    if level == "token":
        return each
    whole = (each.sum(-1) / tokens.lengths).unsqueeze(-1)
    return whole if level == "sequence" else whole.detach() + (tokens.log_probs - tokens.log_probs.detach())


def clipped_weight(log_ratio: Tensor, advantages: Tensor, low: float, high: float, delta: float | None) -> Tensor:
    """The logarithm of the ratio whose product with the advantage is the smaller one: bounded from above if the
    advantage is positive, from below and by `delta` if it is negative. It is the logarithm that is bounded: the
    gradient of an exponential that overflows would be 0 * inf where the bound is chosen."""
    most = math.inf
    if delta is not None:
        high, most = min(high, math.log(delta)), max(high, math.log(delta))
    return torch.where(advantages >= 0.0, log_ratio.clamp(max=high), log_ratio.clamp(low, most))


def kl_of(d: Tensor, estimator: str, log_ratio: Tensor) -> Tensor:
    """An estimate of the KL divergence by each token, of d = log pi_ref - log pi."""
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        return torch.expm1(d) - d
    # The product of k3 with the weight, by logarithms: one may overflow where the other underflows. Where k3 is 0, so
    # are the product and its derivatives.
    large = d > 20.0
    small, large_d = torch.where(large, 0.0, d), torch.where(large, d, 20.0)
    k3 = torch.expm1(small) - small
    none = (k3 == 0.0) & ~large
    log_k3 = torch.where(large, large_d + torch.log1p(-(large_d + 1.0) * torch.exp(-large_d)),
                         torch.log(torch.where(large | none, 1.0, k3)))  # fmt: skip
    return torch.where(none, 0.0, torch.where(none, 0.0, log_k3 + log_ratio).exp())


def vespo_weight(each: Tensor, ratio: Tensor | None, k: Tensor, rate: Tensor, counts: Tensor) -> Tensor:
    """e^l w^k e^(-l w) of the importance weight w of each sequence, with l = `rate`."""
    least = math.log(1e-8)
    total = each.clamp(-20.0, 20.0).sum(-1, keepdim=True)
    if ratio is not None:
        total = total + torch.where(counts, ratio.log().clamp(least, 20.0), 0.0).sum(-1, keepdim=True)
    log_w = total.clamp(least, 20.0)
    return (rate + k * log_w - rate * log_w.exp()).exp()
