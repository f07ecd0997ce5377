"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal."""

from __future__ import annotations

import math

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
            torch.where(counts.unsqueeze(-1), x.to(wide_dtype(logits.dtype)), 0.0) / options.temperature, -1
        )
        for x in (logits, teacher_logits)
    )
    if options.beta == 0.0:
        each = _kl(log_p, log_q)
    elif options.beta == 1.0:
        each = _kl(log_q, log_p)
    else:
        # A class that both rule out has no gradient; that of logaddexp would be NaN.
        neither = (log_p == -torch.inf) & (log_q == -torch.inf)
        log_m = torch.logaddexp(
            log_p.masked_fill(neither, 0.0) + math.log(options.beta),
            log_q.masked_fill(neither, 0.0) + math.log1p(-options.beta),
        )
        each = options.beta * _kl(log_p, log_m) + (1.0 - options.beta) * _kl(log_q, log_m)
    each = each - each.detach().clamp(max=0.0)  # negative by rounding; its gradient stays
    return torch.where(counts, each, 0.0).contiguous()


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    """KL(a || b). A class of probability 0 adds nothing: 0 * inf would be NaN."""
    a = log_a.exp()
    return (a * (log_a - log_b).masked_fill(a == 0.0, 0.0)).sum(-1)
