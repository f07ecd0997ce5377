"""Direct preference optimisation and its variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from foundry_kernels.core.checks import check_number, check_positive, check_shape, check_tensor
from foundry_kernels.losses.pairs import bounded, likelihood_of, metrics_of, reference_of, smoothed, sums_of
from foundry_kernels.losses.tokens import (
    Tokens,
    check_choice,
    check_rows,
    check_smoothing,
    from_hidden,
    halves,
    mean,
    shape_of_pairs,
    tokens_of,
)

F_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")


class _Pairs(NamedTuple):
    """``[B]`` each. The scores are the logarithms of policy over reference by a divergence, their sums over tokens."""

    logps: tuple[Tensor, Tensor]
    ref: tuple[Tensor, Tensor]
    above: tuple[Tensor, Tensor]
    scores: tuple[Tensor, Tensor]
    lengths: tuple[Tensor, Tensor]
    likelihood: Tensor
    beta: float
    smoothing: float
    tau: float

    @property
    def h(self) -> Tensor:
        return self.beta * (self.scores[0] - self.scores[1])

    @property
    def per_token(self) -> Tensor:
        return self.scores[0] / self.lengths[0] - self.scores[1] / self.lengths[1]

    @property
    def rewards(self) -> tuple[Tensor, Tensor]:
        return self.beta * self.above[0], self.beta * self.above[1]


def _exo(p: _Pairs) -> Tensor:
    win, lose = (logsigmoid(x).clamp(min=-1e4) for x in (p.h, -p.h))  # x e^x of -inf would be NaN
    return win.exp() * (win - math.log1p(-p.smoothing)) + lose.exp() * (lose - math.log(p.smoothing))


def _discopop(p: _Pairs) -> Tensor:
    h = p.h.clamp(-1e30, 1e30)
    return torch.exp(logsigmoid(h / p.tau) - h) - logsigmoid(h) * torch.sigmoid(-h / p.tau)


def _aot(p: _Pairs) -> Tensor:
    policy, reference = (of[0] - of[1] for of in (p.logps, p.ref))
    return smoothed(p.beta * (policy.sort().values - reference.sort().values), p.smoothing)


#: Of each `loss_type`, the loss of each pair.
DPO_TYPES: dict[str, Callable[[_Pairs], Tensor]] = {
    "sigmoid": lambda p: smoothed(p.h, p.smoothing),
    "hinge": lambda p: torch.relu(1.0 - p.h),
    "ipo": lambda p: (p.per_token - 1.0 / (2.0 * p.beta)).square(),
    "exo_pair": _exo,
    "nca_pair": lambda p: -logsigmoid(p.rewards[0]) - 0.5 * (logsigmoid(-p.rewards[0]) + logsigmoid(-p.rewards[1])),
    "robust": lambda p: (
        (p.smoothing * logsigmoid(-p.h) - (1.0 - p.smoothing) * logsigmoid(p.h)) / (1.0 - 2.0 * p.smoothing)
    ),
    "bco_pair": lambda p: -logsigmoid(p.rewards[0]) - logsigmoid(-p.rewards[1]),
    "sppo_hard": lambda p: (p.above[0] - 0.5 / p.beta).square() + (p.above[1] + 0.5 / p.beta).square(),
    "aot": _aot,
    "aot_unpaired": lambda p: smoothed(p.beta * (p.above[0].sort().values - p.above[1].sort().values), p.smoothing),
    "apo_zero": lambda p: torch.sigmoid(-p.rewards[0]) + torch.sigmoid(p.rewards[1]),
    "apo_down": lambda p: torch.sigmoid(p.rewards[0]) + torch.sigmoid(p.rewards[1] - p.rewards[0]),
    "discopop": _discopop,
    "sft": lambda p: p.likelihood.expand(p.lengths[0].shape),
    "sigmoid_norm": lambda p: -logsigmoid(p.beta * p.per_token),
}
#: The types of means over tokens, and those with `label_smoothing`.
OF_MEANS = ("ipo", "sigmoid_norm")
SMOOTHED = ("sigmoid", "exo_pair", "robust", "aot", "aot_unpaired")


def dpo(
    log_probs: Tensor,
    mask: Tensor,
    ref_logps: Tensor | None,
    *,
    entropies: Tensor | None = None,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    loss_type: str | Sequence[str] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 1.0,
    ld_alpha: float | None = None,
    discopop_tau: float = 0.05,
    pair_weights: Tensor | None = None,
    return_metrics: bool = False,
) -> Any:
    r"""Direct preference optimisation: of :math:`h = s_c - s_r`, with :math:`s = \log \pi - \log \pi_\mathrm{ref}` of
    the chosen and the rejected answer, the mean over the pairs of

    .. math:: -(1 - \epsilon) \log \sigma(\beta h) - \epsilon \log \sigma(-\beta h)

    Args:
        log_probs: ``[2 B, T]``, chosen sequences before rejected ones.
        mask: ``[2 B, T]``, nonzero where a token counts.
        ref_logps: the reference model's log-probabilities, ``[2 B, T]`` of the tokens, or ``[2 B]`` of the sequences:
            their sum, for "ipo" and "sigmoid_norm" their mean over the tokens. Both kinds in one call, and `ld_alpha`,
            need those of the tokens. None: without a reference. A sequence without tokens has a log-probability of 0
            under both models, whatever is given here.
        entropies: ``[2 B, T]``, for metrics.
        beta: the strength of the preference.
        label_smoothing: :math:`\epsilon`, the probability that a pair is the wrong way round, in 0 .. 0.5; for
            "sigmoid", "robust" (without the bias that smoothing has), "aot", "aot_unpaired", and above 0 for
            "exo_pair".
        loss_type: what replaces the formula: "hinge", :math:`\max(0, 1 - \beta h)`; "ipo",
            :math:`(h - 1 / (2 \beta))^2` of means over tokens; "sigmoid_norm", the formula of these means; "exo_pair",
            "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", as
            in TRL; "sft", the negative log-likelihood of the chosen tokens. Several are added, as for RPO
            ("sigmoid", "sft") and MPO ("sigmoid", "bco_pair", "sft").
        loss_weights: their factors; None for 1.
        f_divergence_type: s by f': "reverse_kl", as above; "forward_kl", :math:`1 - e^{-s}`; "js_divergence",
            :math:`\log 2 + \log \sigma(s)`; "alpha_divergence", :math:`(e^{(a - 1) s} - 1) / (a - 1)`. An exponent
            above 80 counts as 80. The types that have rewards of their own (from "nca_pair" on, except "discopop")
            keep the s above.
        f_alpha_divergence_coef: a.
        ld_alpha: the factor of the tokens of an answer beyond the length of the shorter one of its pair ("LD-DPO").
        discopop_tau: its temperature.
        pair_weights: ``[B]``, factors of the pairs without a gradient, such as those of WPO.
        return_metrics: whether to return :class:`PreferenceMetrics`.

    Returns:
        A scalar of log_probs' dtype, or the metrics with it.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Rafailov et al., "Direct Preference Optimization", 2023, arXiv:2305.18290; Azar et al., "A General Theoretical
    Paradigm to Understand Learning from Human Preferences", 2023, arXiv:2310.12036 (IPO); Zhao et al., "SLiC-HF", 2023,
    arXiv:2305.10425 (hinge); Wang et al., "Beyond Reverse KL", 2023, arXiv:2309.16240 (divergences); Ji et al., 2024,
    arXiv:2402.00856 (EXO); Chen et al., 2024, arXiv:2402.05369 (NCA); Chowdhury et al., 2024, arXiv:2403.00409
    (robust); Jung et al., 2024, arXiv:2404.04656 (BCO); Wu et al., 2024, arXiv:2405.00675 (SPPO); Melnyk et al., 2024,
    arXiv:2406.05882 (AOT); D'Oosterlinck et al., 2024, arXiv:2408.06266 (APO); Lu et al., 2024, arXiv:2406.08414
    (DiscoPOP); Liu et al., 2024, arXiv:2409.06411 (LD-DPO); Zhou et al., 2024, arXiv:2406.11827 (WPO).
    """
    shape = shape_of_pairs(log_probs, mask)
    types = (loss_type,) if isinstance(loss_type, str) else tuple(loss_type)
    for each in types:
        check_choice("loss_type", each, tuple(DPO_TYPES))
    weights = (1.0,) * len(types) if loss_weights is None else tuple(loss_weights)
    if not types or len(weights) != len(types):
        raise ValueError(f"loss_weights must hold a number for each of {len(types)} loss types; got {len(weights)}")
    check_positive("beta", beta)
    check_positive("discopop_tau", discopop_tau)
    check_choice("f_divergence_type", f_divergence_type, F_DIVERGENCES)
    check_number("f_alpha_divergence_coef", f_alpha_divergence_coef)
    check_smoothing(label_smoothing)
    if label_smoothing and not any(each in SMOOTHED for each in types):
        raise ValueError(f"label_smoothing needs one of the loss types {', '.join(SMOOTHED)}; got {loss_type!r}")
    if "exo_pair" in types and not label_smoothing:
        raise ValueError("loss_type 'exo_pair' needs a label_smoothing above 0")
    kinds = {each in OF_MEANS for each in types if each != "sft"}
    by_token = ref_logps is not None and isinstance(ref_logps, Tensor) and ref_logps.dim() == 2
    if ref_logps is not None:
        check_rows("ref_logps", ref_logps, shape if by_token else shape[:1])
        if not by_token and (ld_alpha is not None or len(kinds) > 1):
            raise ValueError("ld_alpha, and types of sums beside types of means, need ref_logps of tokens, [2 B, T]")
    if ld_alpha is not None:
        check_number("ld_alpha", ld_alpha)
    if pair_weights is not None:
        check_tensor("pair_weights", pair_weights)
        check_shape("pair_weights", pair_weights, (shape[0] // 2,), "one for each pair")

    tokens = tokens_of(log_probs, mask, entropies)
    factor = None if ld_alpha is None else _length_factor(tokens, ld_alpha)
    logps = sums_of(tokens.log_probs, factor)
    ref = reference_of(ref_logps, tokens, factor, means=True in kinds)
    above = halves(logps - ref)
    pairs = _Pairs(
        halves(logps), halves(ref), above,
        (_score(above[0], f_divergence_type, f_alpha_divergence_coef),
         _score(above[1], f_divergence_type, f_alpha_divergence_coef)),
        halves(tokens.lengths), likelihood_of(tokens), beta, label_smoothing, discopop_tau,
    )  # fmt: skip
    of_pairs = sum(weight * DPO_TYPES[each](pairs) for each, weight in zip(types, weights, strict=True))
    assert isinstance(of_pairs, Tensor)
    loss = mean(of_pairs if pair_weights is None else of_pairs * pair_weights.detach().to(of_pairs.dtype))
    if not return_metrics:
        return loss
    return metrics_of(loss, pairs.rewards, pairs.logps, tokens)


@from_hidden(dpo)
def dpo_loss(hidden: Tensor, weight: Tensor, target: Tensor, ref_logps: Tensor | None, **options: Any) -> Any:
    """:func:`dpo` of hidden states ``[2 B, T, D]``, the head's `weight` ``[V, D]`` and the tokens `target` ``[2 B,
    T]``.

    Args:
        options: those of :func:`dpo` and of the head, see :mod:`foundry_kernels.losses`.
    """


def _length_factor(tokens: Tokens, alpha: float) -> Tensor:
    """Each token's factor: 1, or alpha beyond the length of the shorter answer of its pair."""
    shared = torch.minimum(*halves(tokens.counts.sum(-1))).repeat(2).unsqueeze(-1)
    place = tokens.counts.cumsum(-1)
    return torch.where(place > shared, tokens.log_probs.new_full((), alpha), tokens.log_probs.new_ones(()))


def _score(s: Tensor, divergence: str, a: float) -> Tensor:
    """f' of the ratio e^s."""
    if divergence == "forward_kl":
        return -torch.expm1(bounded(-s))
    if divergence == "js_divergence":
        return math.log(2.0) + logsigmoid(s)
    if divergence == "alpha_divergence" and abs(a - 1.0) >= 1e-6:
        return torch.expm1(bounded((a - 1.0) * s)) / (a - 1.0)
    return s
