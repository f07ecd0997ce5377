"""Preferences between answers: DPO, IPO, KTO, ORPO, CPO and SimPO.

A batch of pairs has the chosen sequences in its first half and their rejected ones in the second.

An answer without tokens that count has the log-probability 0 under every model. DPO, IPO, KTO and CPO take this number,
as TRL does. ORPO and SimPO have no number for it: their mean over the pairs leaves out a pair of which one side has no
tokens. A mean over no pairs or no sequences is 0.
"""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from foundry_kernels.core.checks import check_number, check_positive, check_shape, check_tensor
from foundry_kernels.losses.tokens import HeadOptions, check_rows, halves, mean, sequence_logps, token_logps

DPO_TYPES = ("sigmoid", "ipo", "hinge")


def dpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    ref_logps: Tensor | None,
    *,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str = "sigmoid",
    **head: Unpack[HeadOptions],
) -> Tensor:
    r"""Direct preference optimisation: of :math:`h = (\log \pi_c - \log \pi_r) - (\log \pi_{\mathrm{ref},c} - \log
    \pi_{\mathrm{ref},r})`, the mean over the pairs of

    .. math:: -(1 - s) \log \sigma(\beta h) - s \log \sigma(-\beta h), \quad
       \left(h - \tfrac{1}{2 \beta}\right)^2 \text{ (IPO)}, \quad \max(0, 1 - \beta h) \text{ (hinge)}

    Args:
        hidden: ``[2 B, T, D]``, chosen sequences before rejected ones. weight: ``[V, D]``. target: ``[2 B, T]``.
        ref_logps: ``[2 B]``, the reference model's log-probabilities of the sequences: their sum, for IPO their mean
            over the tokens (:func:`foundry_kernels.losses.tokens.sequence_logps`). None: without a reference. A
            sequence without tokens has a log-probability of 0 under both models, whatever is given here.
        beta: the strength of the preference.
        label_smoothing: s, the probability that a pair is the wrong way round ("sigmoid" only).
        loss_type: "sigmoid", "ipo" (h of the means over tokens) or "hinge".
        head: see :mod:`foundry_kernels.losses`.

    Returns:
        A float32 scalar.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Rafailov et al., "Direct Preference Optimization", 2023, arXiv:2305.18290; Azar et al., "A General Theoretical
    Paradigm to Understand Learning from Human Preferences", 2023, arXiv:2310.12036 (IPO); Zhao et al., "SLiC-HF", 2023,
    arXiv:2305.10425 (hinge).
    """
    if loss_type not in DPO_TYPES:
        raise ValueError(f"loss_type must be one of {', '.join(DPO_TYPES)}; got {loss_type!r}")
    check_positive("beta", beta)
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in 0 .. 0.5; got {label_smoothing}")
    if label_smoothing and loss_type != "sigmoid":
        raise ValueError(f"label_smoothing is supported with loss_type 'sigmoid'; got {loss_type!r}")
    logps = sequence_logps(hidden, weight, target, average=loss_type == "ipo", **head)
    chosen, rejected = halves("hidden", _without_reference(logps, ref_logps, target, head))
    h = chosen - rejected
    if loss_type == "ipo":
        return mean((h - 1.0 / (2.0 * beta)).square())
    if loss_type == "hinge":
        return mean(torch.relu(1.0 - beta * h))
    each = (1.0 - label_smoothing) * logsigmoid(beta * h)
    if label_smoothing:  # 0 * logsigmoid(-inf) would be NaN
        each = each + label_smoothing * logsigmoid(-beta * h)
    return -mean(each)


def kto_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    desirable: Tensor,
    ref_logps: Tensor,
    *,
    kl: Tensor | float = 0.0,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    **head: Unpack[HeadOptions],
) -> Tensor:
    r"""Kahneman-Tversky optimisation, of answers that are each desirable or not: with :math:`r = \log \pi - \log
    \pi_\mathrm{ref}` and the reference point :math:`z`, the mean over the sequences of

    .. math:: w_d \left(1 - \sigma(\beta (r - z))\right) \text{ and } w_u \left(1 - \sigma(\beta (z - r))\right)

    Args:
        hidden: ``[B, T, D]``. weight: ``[V, D]``. target: ``[B, T]``.
        desirable: ``[B]`` bool.
        ref_logps: ``[B]``, the reference model's log-probabilities of the sequences. A sequence without tokens has a
            log-probability of 0 under both models, whatever is given here.
        kl: z, an estimate of the KL divergence of the policy from the reference, without a gradient; at least 0.
        beta: the strength of the preference.
        desirable_weight, undesirable_weight: :math:`w_d` and :math:`w_u`.
        head: see :mod:`foundry_kernels.losses`.

    Returns:
        A float32 scalar.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Ethayarajh et al., "KTO: Model Alignment as Prospect Theoretic Optimization", 2024, arXiv:2402.01306.
    """
    check_positive("beta", beta)
    check_number("desirable_weight", desirable_weight)
    check_number("undesirable_weight", undesirable_weight)
    check_tensor("desirable", desirable)
    if desirable.dtype != torch.bool:
        raise TypeError(f"desirable must be bool; got {desirable.dtype}")
    logps = sequence_logps(hidden, weight, target, **head)
    check_shape("desirable", desirable, tuple(logps.shape), "one for each sequence")
    above = _without_reference(logps, ref_logps, target, head) - (kl.detach() if isinstance(kl, Tensor) else kl)
    each = 1.0 - torch.sigmoid(beta * torch.where(desirable, above, -above))
    return mean(torch.where(desirable, desirable_weight * each, undesirable_weight * each))


def orpo_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, *, beta: float = 0.1, **head: Unpack[HeadOptions]
) -> Tensor:
    r"""Odds ratio preference optimisation: the negative log-likelihood of the chosen tokens, plus the mean over the
    pairs of :math:`-\beta \log \sigma(\mathrm{logit}\, p_c - \mathrm{logit}\, p_r)`, where :math:`\log p` is the mean
    over a sequence's tokens.

    A pair of which one side has no tokens is left out of this mean, though not out of the likelihood. A :math:`\log p`
    of 0 is taken for the nearest normal number below, -1e-38 in float32: so the odds of an answer are finite even if
    all of its tokens are certain, and gradients are finite too.

    Args:
        hidden: ``[2 B, T, D]``, chosen sequences before rejected ones. weight: ``[V, D]``. target: ``[2 B, T]``.
        beta: the factor of the odds ratio (lambda in the paper).
        head: see :mod:`foundry_kernels.losses`.

    Returns:
        A float32 scalar.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Hong et al., "ORPO: Monolithic Preference Optimization without Reference Model", 2024, arXiv:2403.07691.
    """
    check_number("beta", beta)
    chosen, rejected, whole, likelihood = _pairs(hidden, weight, target, average=True, **head)
    log_odds = (chosen - rejected) - (_log1mexp(chosen) - _log1mexp(rejected))
    return likelihood - beta * _mean_of(whole, logsigmoid(log_odds))


def cpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    beta: float = 0.1,
    cpo_alpha: float = 1.0,
    **head: Unpack[HeadOptions],
) -> Tensor:
    r"""Contrastive preference optimisation: the mean over the pairs of :math:`-\log \sigma(\beta (\log \pi_c - \log
    \pi_r))`, plus `cpo_alpha` times the negative log-likelihood of the chosen tokens.

    Arguments as for :func:`orpo_loss`. A sequence without tokens has a log-probability of 0.

    Xu et al., "Contrastive Preference Optimization", 2024, arXiv:2401.08417.
    """
    check_positive("beta", beta)
    check_number("cpo_alpha", cpo_alpha)
    chosen, rejected, _, likelihood = _pairs(hidden, weight, target, average=False, **head)
    return cpo_alpha * likelihood - mean(logsigmoid(beta * (chosen - rejected)))


def simpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    beta: float = 2.0,
    simpo_gamma: float = 0.5,
    **head: Unpack[HeadOptions],
) -> Tensor:
    r"""Simple preference optimisation: the mean over the pairs of :math:`-\log \sigma(\beta (\log p_c - \log p_r) -
    \gamma)`, where :math:`\log p` is the mean over a sequence's tokens. A pair of which one side has no tokens is left
    out.

    Args:
        hidden, weight, target: as for :func:`orpo_loss`.
        beta: the scale of the reward.
        simpo_gamma: the margin.
        head: see :mod:`foundry_kernels.losses`.

    Returns:
        A float32 scalar.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Meng et al., "SimPO: Simple Preference Optimization with a Reference-Free Reward", 2024, arXiv:2405.14734.
    """
    check_positive("beta", beta)
    check_number("simpo_gamma", simpo_gamma)
    chosen, rejected, whole, _ = _pairs(hidden, weight, target, average=True, **head)
    return -_mean_of(whole, logsigmoid(beta * (chosen - rejected) - simpo_gamma))


def _pairs(
    hidden: Tensor, weight: Tensor, target: Tensor, average: bool, **head: Unpack[HeadOptions]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The log-probabilities of chosen and rejected sequences, which pairs have tokens on both sides, and the negative
    log-likelihood of the chosen tokens."""
    each, counts = token_logps(hidden, weight, target, **head)
    sums, lengths = each.sum(-1), counts.sum(-1)
    (chosen, rejected), (of_chosen, of_rejected) = halves("hidden", sums), halves("hidden", lengths)
    likelihood = -chosen.sum() / of_chosen.sum().clamp(min=1)
    if average:
        chosen, rejected = halves("hidden", sums / lengths.clamp(min=1))
    return chosen, rejected, (of_chosen > 0) & (of_rejected > 0), likelihood


def _mean_of(which: Tensor, each: Tensor) -> Tensor:
    return torch.where(which, each, 0.0).sum() / which.sum().clamp(min=1)


def _without_reference(logps: Tensor, ref_logps: Tensor | None, target: Tensor, head: HeadOptions) -> Tensor:
    """logps - ref_logps; 0 for a sequence without tokens."""
    if ref_logps is None:
        return logps
    check_rows("ref_logps", ref_logps, logps)
    some = (target != head.get("ignore_index", -100)).any(-1)
    return torch.where(some, logps - ref_logps.detach().to(logps.dtype), 0.0)


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - e^x) of x < 0, by whichever of two forms keeps its digits. 0 is taken for the number below it."""
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    near = x > -0.693
    return torch.where(
        near, torch.log(-torch.expm1(torch.where(near, x, -1.0))), torch.log1p(-torch.exp(torch.where(near, -1.0, x)))
    )
