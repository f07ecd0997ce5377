"""Distillation by its formulas, over all logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def distilled(
    x: dict[str, Tensor], kind: str, beta: float = 0.5, temperature: float = 1.0,
    caps: Sequence[float] = (math.inf, math.inf),
    scales: Sequence[float] = (1.0, 1.0), items: float | None = None, tail: bool | None = None,
) -> Tensor:  # fmt: skip
    """The mean of a divergence over the tokens, of all classes or (tail: with the others in one) of some."""
    mask = x["target"] != -100
    logits = [
        y if cap == math.inf else cap * torch.tanh(y / cap)
        for y, cap in zip(
            (scales[0] * x["hidden"] @ x["weight"].t(), scales[1] * x["teacher"] @ x["teacher_weight"].t()), caps,
            strict=True,
        )
    ]  # fmt: skip
    log_q, log_p = (torch.log_softmax(torch.where(mask[..., None], y, 0.0) / temperature, -1) for y in logits)
    if tail is not None:
        others = torch.ones_like(log_q).scatter(-1, x["ids"], 0.0).bool()
        log_q = torch.cat([
            log_q.gather(-1, x["ids"]), log_q.masked_fill(~others, -math.inf).logsumexp(-1, keepdim=True)
        ], -1)  # fmt: skip
        listed = torch.where(mask[..., None], x["listed"], -2.0)
        log_p = torch.cat([listed, torch.log1p(-listed.exp().sum(-1, keepdim=True))], -1)
        if not tail:
            log_q, log_p = (y[..., :-1].log_softmax(-1) for y in (log_q, log_p))
    q, p = log_q.exp(), log_p.exp()
    log_m = torch.log(beta * p + (1.0 - beta) * q)
    each = {
        "forward": p * (log_p - log_q), "reverse": q * (log_q - log_p), "tvd": (q - p).abs() / 2.0,
        "jsd": beta * p * (log_p - log_m) + (1.0 - beta) * q * torch.where(q > 0.0, log_q - log_m, 0.0),
    }[kind].sum(-1)  # fmt: skip
    return (each * mask).sum() / (items or max(float(mask.sum()), 1.0))
