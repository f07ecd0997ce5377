"""Other results for each token: the predicted class, and the probability of its target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: The prediction of an ignored token.
NO_CLASS = -1


def known_targets(target: Tensor, n_classes: int, ignore_index: int) -> Tensor:
    """Whether each target is a class that is not ignored."""
    return (target != ignore_index) & (target >= 0) & (target < n_classes)


def predictions(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """The class of each token's largest logit, the first of equal ones, int64; `NO_CLASS` for ignored tokens.

    One more pass over logits ``[..., V]``, which makes nothing of their size."""
    known = known_targets(target, logits.shape[-1], ignore_index)
    return logits.detach().argmax(-1).masked_fill(~known, NO_CLASS)


def probabilities(logits: Tensor, target: Tensor, lse: Tensor, ignore_index: int, softcap: float | None) -> Tensor:
    """Each target's probability, in lse's dtype, without a gradient: one logit a token is read."""
    known = known_targets(target, logits.shape[-1], ignore_index)
    index = torch.where(known, target, 0).long().unsqueeze(-1)
    picked = logits.detach().gather(-1, index).squeeze(-1).to(lse.dtype)
    return probabilities_of(picked, known, lse, softcap)


def probabilities_of(picked: Tensor, known: Tensor, lse: Tensor, softcap: float | None) -> Tensor:
    """Each target's probability, from the targets' logits before the soft cap."""
    if softcap is not None:
        picked = softcap * torch.tanh(picked / softcap)
    # Rounding may leave a logit a little above lse. What is not known has any lse and must not make a NaN of its 0.
    return torch.where(known, (picked - lse.detach()).clamp(max=0.0).exp(), 1.0)


def accuracy(predicted: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """float32: 1 for each token whose prediction is its target and 0 for others; reduced, the mean over the tokens that
    count, 0 where there are none."""
    counts = target != ignore_index
    right = (counts & (predicted == target)).to(torch.float32)
    return right if reduction == "none" else right.sum() / counts.sum().clamp(min=1)


def with_predictions(
    found: Tensor | tuple[Any, ...], predicted: Tensor, target: Tensor, ignore_index: int, reduction: str,
    return_token_accuracy: bool, return_predicted_tokens: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The results of a call, followed by the requested predictions."""
    results = found if isinstance(found, tuple) else (found,)
    if return_token_accuracy:
        results = (*results, accuracy(predicted, target, ignore_index, reduction))
    return (*results, predicted) if return_predicted_tokens else results
