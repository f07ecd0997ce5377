"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.cross_entropy.reference import check_targets
from foundry_kernels.ops.log_probs.options import LogProbsOptions


def log_probs(logits: Tensor, target: Tensor, options: LogProbsOptions) -> tuple[Tensor, Tensor | None, Tensor | None]:
    n_classes = logits.shape[-1]
    counts, known = target != options.ignore_index, (target >= 0) & (target < n_classes)
    check_targets(target, known | ~counts, n_classes, options.ignore_index)
    # An ignored token must not change the result, whatever its logits are: 0 * NaN would be NaN.
    y = torch.where(counts.unsqueeze(-1), logits.to(wide_dtype(logits.dtype)), 0.0) * options.logit_scale
    if options.softcap is not None:
        y = options.softcap * torch.tanh(y / options.softcap)
    log_p = torch.log_softmax(y, -1)
    index = torch.where(known, target, 0).long()

    def of_tokens(x: Tensor) -> Tensor:
        return torch.where(
            known & counts, x, torch.where(counts, torch.nan, 0.0)
        )  # NaN on a GPU, where nothing is raised

    picked = of_tokens(log_p.gather(-1, index.unsqueeze(-1)).squeeze(-1))
    entropy = lse = None
    if options.return_entropy:
        # A class of probability 0 adds nothing: 0 * inf would be NaN.
        entropy = of_tokens(-(log_p.exp() * log_p.masked_fill(log_p == -torch.inf, 0.0)).sum(-1))
    if options.return_lse:
        lse = of_tokens(torch.logsumexp(y, -1))
    return picked, entropy, lse
