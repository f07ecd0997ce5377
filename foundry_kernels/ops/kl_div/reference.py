"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.kl_div.options import KlDivOptions


def kl_div(logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions) -> Tensor:
    """The divergence of each token."""
    counts = target != options.ignore_index
    # An ignored token must not change the result, whatever its logits are: 0 * NaN would be NaN.
    log_q, log_p = (
        torch.log_softmax(
            capped(torch.where(counts.unsqueeze(-1), x.to(wide_dtype(logits.dtype)), 0.0), cap) / options.temperature,
            -1,
        )
        for x, cap in ((logits, options.softcap), (teacher_logits, options.teacher_softcap))
    )
    if options.direction == "forward":
        each = _kl(log_p, log_q)
    elif options.direction == "reverse":
        each = _kl(log_q, log_p)
    elif options.direction == "tvd":
        each = 0.5 * (log_q.exp() - log_p.exp()).abs().sum(-1)
    else:
        each = _jsd(log_p, log_q, options.beta)
    each = each - each.detach().clamp(max=0.0)  # negative by rounding; its gradient stays
    return torch.where(counts, each, 0.0).contiguous()


def capped(x: Tensor, softcap: float | None) -> Tensor:
    return x if softcap is None else softcap * torch.tanh(x / softcap)


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b). Both sum to 1, so what is added is 0 except for rounding, most of which it takes away."""
    a, b = log_a.exp(), log_b.exp()
    return _sum(a, log_a - log_b) + (b - a).sum(-1)


def _sum(p: Tensor, log_ratio: Tensor) -> Tensor:
    """A class of probability 0 adds nothing: 0 * inf would be NaN."""
    return (p * log_ratio.masked_fill(p == 0.0, 0.0)).sum(-1)


def _jsd(log_p: Tensor, log_q: Tensor, beta: float) -> Tensor:
    """beta KL(p || m) + (1 - beta) KL(q || m). log(m) is the larger logarithm and that of a sum of shares: of 1 where
    the two are near, as the shares' float32 numbers may add up to 1 - 2e-8."""
    neither = (log_p == -torch.inf) & (log_q == -torch.inf)  # such a class has no gradient; inf - inf would be NaN
    d = log_p.masked_fill(neither, 0.0) - log_q.masked_fill(neither, 0.0)
    above = d > 0.0
    below = torch.where(above, -d, d)
    zero = torch.zeros_like(d)  # of two Python numbers torch.where makes float32
    share, other = torch.where(above, zero + (1.0 - beta), beta), torch.where(above, zero + beta, 1.0 - beta)
    near = below > -0.5
    log_sum = torch.where(
        near, torch.log1p(share * torch.expm1(below.masked_fill(~near, 0.0))), torch.log(other + share * below.exp())
    )
    p_over_m, q_over_m = torch.where(above, 0.0, d) - log_sum, torch.where(above, -d, 0.0) - log_sum
    return beta * _sum(log_p.exp(), p_over_m) + (1.0 - beta) * _sum(log_q.exp(), q_over_m)
