"""Preferences between answers: DPO, IPO, KTO, ORPO, CPO and SimPO.

A batch of pairs has the chosen sequences in its first half and their rejected ones in the second.

An answer without tokens that count has the log-probability 0 under every model. DPO, IPO, KTO and CPO take this number,
as TRL does. Losses of the mean over an answer's tokens (ORPO, SimPO, CPO's "ipo") have no number for it: their mean
over the pairs leaves out a pair of which one side has no tokens. A mean over no pairs or no sequences is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from foundry_kernels.core.checks import check_number, check_positive, check_shape, check_tensor
from foundry_kernels.losses.dpo import DPO_TYPES, SMOOTHED, dpo, dpo_loss
from foundry_kernels.losses.pairs import (
    PreferenceMetrics,
    bounded,
    likelihood_of,
    means_of,
    metrics_of,
    only,
    reference_of,
    smoothed,
)
from foundry_kernels.losses.tokens import (
    check_choice,
    check_rows,
    check_smoothing,
    from_hidden,
    halves,
    mean,
    mean_of,
    shape_of,
    shape_of_pairs,
    tokens_of,
)

__all__ = [
    "DPO_TYPES", "SMOOTHED", "PreferenceMetrics", "cpo", "cpo_loss", "dpo", "dpo_loss", "kto", "kto_loss", "orpo",
    "orpo_loss", "simpo", "simpo_loss",
]  # fmt: skip

KTO_TYPES = ("kto", "apo_zero_unpaired")
CPO_TYPES = ("sigmoid", "hinge", "ipo", "simpo")


def kto(
    log_probs: Tensor,
    mask: Tensor,
    desirable: Tensor,
    ref_logps: Tensor,
    *,
    entropies: Tensor | None = None,
    kl: Tensor | float = 0.0,
    beta: float = 0.1,
    loss_type: str = "kto",
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    return_metrics: bool = False,
) -> Any:
    r"""Kahneman-Tversky optimisation, of answers that are each desirable or not: with :math:`r = \log \pi - \log
    \pi_\mathrm{ref}` and the reference point :math:`z`, the mean over the sequences of

    .. math:: w_d \left(1 - \sigma(\beta (r - z))\right) \text{ and } w_u \left(1 - \sigma(\beta (z - r))\right)

    Args:
        log_probs: ``[B, T]``. mask: ``[B, T]``, nonzero where a token counts.
        desirable: ``[B]`` bool.
        ref_logps: ``[B]``, the reference model's log-probabilities of the sequences. A sequence without tokens has a
            log-probability of 0 under both models, whatever is given here.
        entropies: ``[B, T]``, for metrics.
        kl: z, an estimate of the KL divergence of the policy from the reference, without a gradient; at least 0.
        beta: the strength of the preference.
        loss_type: "kto", or "apo_zero_unpaired", which has z = 0.
        desirable_weight, undesirable_weight: :math:`w_d` and :math:`w_u`.
        return_metrics: whether to return :class:`PreferenceMetrics`.

    Returns:
        A scalar of log_probs' dtype, or the metrics with it.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024, arXiv:2402.01306.
    """
    shape = shape_of(log_probs, mask)
    check_positive("beta", beta)
    check_choice("loss_type", loss_type, KTO_TYPES)
    check_number("desirable_weight", desirable_weight)
    check_number("undesirable_weight", undesirable_weight)
    check_tensor("desirable", desirable)
    if desirable.dtype != torch.bool:
        raise TypeError(f"desirable must be bool; got {desirable.dtype}")
    check_shape("desirable", desirable, shape[:1], "one for each sequence")
    check_rows("ref_logps", ref_logps, shape[:1])
    tokens = tokens_of(log_probs, mask, entropies)
    logps = tokens.log_probs.sum(-1)
    above = logps - reference_of(ref_logps, tokens, None, means=False)
    z = kl.detach() if isinstance(kl, Tensor) else kl
    r = above if loss_type == "apo_zero_unpaired" else above - z
    each = 1.0 - torch.sigmoid(beta * torch.where(desirable, r, -r))
    loss = mean(torch.where(desirable, desirable_weight * each, undesirable_weight * each))
    if not return_metrics:
        return loss
    found = [mean_of(which, x.detach()) for x in (beta * above, logps) for which in (desirable, ~desirable)]
    margins = found[0] - found[1]
    return PreferenceMetrics(
        loss, found[0], found[1], None, margins, found[2], found[3], tokens.entropy(), loss.new_tensor(z)
    )  # fmt: skip


@from_hidden(kto)
def kto_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, desirable: Tensor, ref_logps: Tensor, **options: Any
) -> Any:
    """:func:`kto` of hidden states ``[B, T, D]``, the head's `weight` ``[V, D]`` and the tokens `target` ``[B, T]``.

    Args:
        options: those of :func:`kto` and of the head, see :mod:`foundry_kernels.losses`.
    """


def orpo(
    log_probs: Tensor,
    mask: Tensor,
    *,
    entropies: Tensor | None = None,
    nll_mask: Tensor | None = None,
    beta: float = 0.1,
    return_metrics: bool = False,
) -> Any:
    r"""Odds ratio preference optimisation: the negative log-likelihood of the chosen tokens, plus the mean over the
    pairs of :math:`-\beta \log \sigma(\mathrm{logit}\, p_c - \mathrm{logit}\, p_r)`, where :math:`\log p` is the mean
    over a sequence's tokens.

    A pair of which one side has no tokens is left out of this mean, though not out of the likelihood. A :math:`\log p`
    of 0 is taken for the nearest normal number below, -1e-38 in float32: so the odds of an answer are finite even if
    all of its tokens are certain, and gradients are finite too.

    Args:
        log_probs: ``[2 B, T]``, chosen sequences before rejected ones.
        mask: ``[2 B, T]``, nonzero at the tokens of the answers.
        entropies: ``[2 B, T]``, for metrics.
        nll_mask: ``[2 B, T]``, nonzero at the tokens of the likelihood, such as prompt and answer; None: those of
            `mask`.
        beta: the factor of the odds ratio (lambda in the paper).
        return_metrics: whether to return :class:`PreferenceMetrics`.

    Returns:
        A scalar of log_probs' dtype, or the metrics with it.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model", 2024, arXiv:2403.07691.
    """
    shape = shape_of_pairs(log_probs, mask)
    check_number("beta", beta)
    if nll_mask is not None:
        check_tensor("nll_mask", nll_mask)
        check_shape("nll_mask", nll_mask, shape, "like log_probs")
    tokens = tokens_of(log_probs, mask if nll_mask is None else mask.bool() | nll_mask.bool(), entropies)
    likelihood = likelihood_of(tokens if nll_mask is None else only(tokens, nll_mask.bool()))
    tokens = tokens if nll_mask is None else only(tokens, mask.bool())
    chosen, rejected, whole = means_of(tokens)
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    ratio = logsigmoid(log_odds)
    loss = likelihood - beta * mean_of(whole, ratio)
    if not return_metrics:
        return loss
    found = metrics_of(loss, (beta * chosen, beta * rejected), (chosen, rejected), tokens)
    return found._replace(
        nll_loss=likelihood.detach(), log_odds_ratio=mean_of(whole, ratio.detach()),
        log_odds_chosen=mean_of(whole, log_odds.detach()),
    )  # fmt: skip


@from_hidden(orpo)
def _orpo_loss(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any: ...


def orpo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, *, nll_target: Tensor | None = None, **options: Any
) -> Any:
    """:func:`orpo` of hidden states ``[2 B, T, D]``, the head's `weight` ``[V, D]`` and the answers' tokens `target`
    ``[2 B, T]``.

    Args:
        nll_target: ``[2 B, T]``, the tokens of the likelihood, such as prompt and answer, equal to `target` where both
            count. None: those of `target`.
        options: those of :func:`orpo` but `nll_mask`, and of the head, see :mod:`foundry_kernels.losses`.
    """
    if nll_target is None:
        return _orpo_loss(hidden, weight, target, **options)
    check_tensor("target", target)
    check_tensor("nll_target", nll_target)
    check_shape("nll_target", nll_target, tuple(target.shape), "like target")
    ignored = options.get("ignore_index", -100)
    answers, whole = target != ignored, torch.where(target != ignored, target, nll_target)
    return _orpo_loss(hidden, weight, whole, mask=answers, nll_mask=nll_target != ignored, **options)


def cpo(
    log_probs: Tensor,
    mask: Tensor,
    *,
    entropies: Tensor | None = None,
    beta: float = 0.1,
    loss_type: str = "sigmoid",
    label_smoothing: float = 0.0,
    cpo_alpha: float = 1.0,
    simpo_gamma: float = 0.5,
    alpha: float = 0.0,
    return_metrics: bool = False,
) -> Any:
    r"""Contrastive preference optimisation: with :math:`h = \log \pi_c - \log \pi_r`, the mean over the pairs of

    .. math:: -(1 - \epsilon) \log \sigma(\beta h) - \epsilon \log \sigma(-\beta h)

    plus `cpo_alpha` times the negative log-likelihood of the chosen tokens.

    Args:
        log_probs: ``[2 B, T]``, chosen sequences before rejected ones.
        mask: ``[2 B, T]``, nonzero where a token counts.
        entropies: ``[2 B, T]``, for metrics.
        beta: the strength of the preference.
        loss_type: "sigmoid"; "hinge", :math:`\max(0, 1 - \beta h)`; "ipo", :math:`(h - 1 / (2 \beta))^2`; "simpo",
            the formula of :math:`\beta h - \gamma`. "ipo" and "simpo" take the mean over a sequence's tokens, and leave
            out a pair of which one side has no tokens.
        label_smoothing: :math:`\epsilon`, in 0 .. 0.5, for "sigmoid" and "simpo".
        cpo_alpha: the factor of the likelihood.
        simpo_gamma: :math:`\gamma`, the margin.
        alpha: of AlphaPO: :math:`\log p` becomes :math:`(1 - p^{-\alpha}) / \alpha`. Exponents of
            e above 80 count as 80.
        return_metrics: whether to return :class:`PreferenceMetrics`.

    Returns:
        A scalar of log_probs' dtype, or the metrics with it.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Xu et al., "Contrastive Preference Optimization", 2024, arXiv:2401.08417; Meng et al., "SimPO", 2024,
    arXiv:2405.14734; Gupta et al., "AlphaPO", 2025, arXiv:2501.03884.
    """
    shape_of_pairs(log_probs, mask)
    check_positive("beta", beta)
    check_choice("loss_type", loss_type, CPO_TYPES)
    check_smoothing(label_smoothing)
    if label_smoothing and loss_type not in ("sigmoid", "simpo"):
        raise ValueError(f"label_smoothing is for loss_type 'sigmoid' and 'simpo'; got {loss_type!r}")
    for name, value in (("cpo_alpha", cpo_alpha), ("simpo_gamma", simpo_gamma), ("alpha", alpha)):
        check_number(name, value)
    tokens = tokens_of(log_probs, mask, entropies)
    chosen, rejected, whole = means_of(tokens)
    logps = halves(tokens.log_probs.sum(-1))
    if loss_type in ("ipo", "simpo"):
        logps = chosen, rejected
    else:
        whole = torch.ones_like(whole)
    rewards = logps if alpha == 0.0 else tuple(-torch.expm1(bounded(-alpha * x)) / alpha for x in logps)
    h = rewards[0] - rewards[1]
    if loss_type == "hinge":
        each = torch.relu(1.0 - beta * h)
    elif loss_type == "ipo":
        each = (h - 1.0 / (2.0 * beta)).square()
    else:
        each = smoothed(beta * h - simpo_gamma if loss_type == "simpo" else beta * h, label_smoothing)
    likelihood = likelihood_of(tokens) if cpo_alpha != 0.0 else None
    loss = mean_of(whole, each) + (0.0 if likelihood is None else cpo_alpha * likelihood)
    if not return_metrics:
        return loss
    found = metrics_of(loss, (beta * rewards[0], beta * rewards[1]), logps, tokens)
    return found._replace(nll_loss=None if likelihood is None else likelihood.detach())


@from_hidden(cpo)
def cpo_loss(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
    """:func:`cpo` of hidden states ``[2 B, T, D]``, the head's `weight` ``[V, D]`` and the tokens `target` ``[2 B,
    T]``.

    Args:
        options: those of :func:`cpo` and of the head, see :mod:`foundry_kernels.losses`.
    """


def simpo(
    log_probs: Tensor,
    mask: Tensor,
    *,
    entropies: Tensor | None = None,
    beta: float = 2.0,
    simpo_gamma: float = 0.5,
    **options: Any,
) -> Any:
    r"""Simple preference optimisation: the mean over the pairs of :math:`-\log \sigma(\beta (\log p_c - \log p_r) -
    \gamma)`, where :math:`\log p` is the mean over a sequence's tokens. A pair of which one side has no tokens is left
    out. :func:`cpo` with `loss_type` "simpo", and without the likelihood unless `cpo_alpha` is given.

    Args:
        log_probs, mask, entropies, options: as for :func:`cpo`.
        beta: the scale of the reward.
        simpo_gamma: the margin.

    Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward", 2024, arXiv:2405.14734.
    """
    given: dict[str, Any] = {"loss_type": "simpo", "cpo_alpha": 0.0, **options}
    return cpo(log_probs, mask, entropies=entropies, beta=beta, simpo_gamma=simpo_gamma, **given)


@from_hidden(simpo)
def simpo_loss(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
    """:func:`simpo` of hidden states, see :func:`cpo_loss`."""


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) of x < 0, by whichever of two forms keeps its digits. 0 is taken for the number below it."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.693
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )
