"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.cross_entropy.reference import check_targets
from foundry_kernels.ops.log_probs.options import LogProbsOptions


def log_probs(logits: Tensor, target: Tensor, options: LogProbsOptions) -> tuple[Tensor | None, ...]:
    n_classes = logits.shape[-1]
    counts, known = target != options.ignore_index, (target >= 0) & (target < n_classes)
    check_targets(target, known | ~counts, n_classes, options.ignore_index)
    # An ignored token must not change the result, whatever its logits are: 0 * NaN would be NaN.
    x = torch.where(counts.unsqueeze(-1), logits.to(wide_dtype(logits.dtype)), 0.0) * options.logit_scale
    y = x if options.softcap is None else options.softcap * torch.tanh(x / options.softcap)
    log_p = torch.log_softmax(y, -1)
    index = torch.where(known, target, 0).long()

    def of_tokens(x: Tensor) -> Tensor:
        return torch.where(
            known & counts, x, torch.where(counts, torch.nan, 0.0)
        )  # NaN on a GPU, where nothing is raised

    picked = of_tokens(log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1))
    entropy = lse = stats = None
    if options.return_entropy:
        # A class of probability 0 adds nothing: 0 * inf would be NaN.
        entropy = of_tokens(-(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1))
    if options.return_lse:
        lse = of_tokens(torch.logsumexp(y, -1))
    if options.return_stats:
        top1 = (x.argmax(-1) == index).to(y.dtype)  # before the soft cap, which may make different logits equal
        of_rows = (top1, y.mean(-1), torch.logsumexp(2.0 * log_p, -1))
        stats = torch.stack([of_tokens(each) for each in of_rows], -1).detach()
    return picked, entropy, lse, stats
