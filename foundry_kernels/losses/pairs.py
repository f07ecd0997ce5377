"""What losses of preferences have in common."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from foundry_kernels.losses.tokens import Tokens, halves, mean

#: An exponent of e that float32 and bfloat16 hold, with room for sums.
LARGEST_EXPONENT = 80.0


class PreferenceMetrics(NamedTuple):
    """A loss, and numbers without gradients, scalars: TRL's metrics of the same names, means over pairs or sequences
    unless said. None where a loss has no such number."""

    loss: Tensor
    rewards_chosen: Tensor
    rewards_rejected: Tensor
    rewards_accuracies: Tensor | None
    rewards_margins: Tensor | None
    logps_chosen: Tensor
    logps_rejected: Tensor
    #: The mean over the tokens, if entropies are given.
    entropy: Tensor | None = None
    #: KTO's reference point.
    kl: Tensor | None = None
    #: The negative log-likelihood of the chosen tokens, of CPO and ORPO.
    nll_loss: Tensor | None = None
    log_odds_ratio: Tensor | None = None
    log_odds_chosen: Tensor | None = None


def smoothed(x: Tensor, smoothing: float) -> Tensor:
    """-log sigmoid(x), of which a part counts the other way round."""
    found = (1.0 - smoothing) * logsigmoid(x)
    return -(found + smoothing * logsigmoid(-x) if smoothing else found)  # 0 * logsigmoid(-inf) would be NaN


def bounded(exponent: Tensor) -> Tensor:
    """An exponent whose power is finite, with finite gradients."""
    return exponent.clamp(max=LARGEST_EXPONENT)


def sums_of(each: Tensor, factor: Tensor | None = None) -> Tensor:
    return (each if factor is None else each * factor).sum(-1)


def means_of(tokens: Tokens) -> tuple[Tensor, Tensor, Tensor]:
    """The means over the tokens of chosen and rejected sequences, and which pairs have tokens on both sides."""
    chosen, rejected = halves(tokens.log_probs.sum(-1) / tokens.lengths)
    some = halves(tokens.counts.any(-1))
    return chosen, rejected, some[0] & some[1]


def likelihood_of(tokens: Tokens) -> Tensor:
    """The negative log-likelihood of the chosen tokens, a mean over them."""
    chosen = halves(tokens.log_probs)[0]
    return -chosen.sum() / halves(tokens.counts)[0].sum().clamp(min=1)


def only(tokens: Tokens, counts: Tensor) -> Tokens:
    return tokens._replace(log_probs=torch.where(counts, tokens.log_probs, 0.0), counts=counts)


def reference_of(ref_logps: Tensor | None, tokens: Tokens, factor: Tensor | None, means: bool) -> Tensor:
    """The reference's sums ``[B]`` over the tokens of each sequence, from those of tokens, sums or means; 0 for a
    sequence without tokens."""
    logps = tokens.log_probs
    if ref_logps is None:
        return logps.new_zeros(logps.shape[0])
    ref = ref_logps.detach().to(logps.dtype)
    if ref.dim() == 2:
        return sums_of(torch.where(tokens.counts, ref, 0.0), factor)
    return torch.where(tokens.counts.any(-1), ref * tokens.lengths if means else ref, 0.0)


def metrics_of(
    loss: Tensor, rewards: tuple[Tensor, Tensor], logps: tuple[Tensor, Tensor], tokens: Tokens
) -> PreferenceMetrics:
    chosen, rejected = (x.detach() for x in rewards)
    accuracy = mean((chosen > rejected).to(loss.dtype))
    of_logps = mean(logps[0].detach()), mean(logps[1].detach())
    margin = mean(chosen - rejected)
    return PreferenceMetrics(loss, mean(chosen), mean(rejected), accuracy, margin, *of_logps, tokens.entropy())
