"""Policy gradients: GRPO and its variants, and PPO's policy term."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.checks import (
    check_int,
    check_not_negative,
    check_number,
    check_positive,
    check_shape,
    check_tensor,
)
from foundry_kernels.losses.importance import clipped_weight, kl_of, level_of, vespo_weight
from foundry_kernels.losses.tokens import (
    Tokens,
    check_choice,
    check_items,
    check_rows,
    from_hidden,
    mean,
    over_items,
    shape_of,
    tokens_of,
)

#: Each loss, and what its sum is divided by: the lengths of sequences, then their number; the number of tokens; a
#: constant; the tokens of a step; the number of sequences.
LOSS_TYPES = {
    "grpo": "sequences", "bnpo": "tokens", "dr_grpo": "constant", "dapo": "items", "luspo": "sums",
    "cispo": "items", "sapo": "sequences", "vespo": "items", "gmpo": "sequences", "rloo": "sequences",
}  # fmt: skip
LEVELS = ("token", "sequence", "sequence_token")
KL_ESTIMATORS = ("k1", "k2", "k3", "unbiased")


class PolicyMetrics(NamedTuple):
    """A loss of :func:`grpo`, and TRL's metrics of the same names: scalars of its dtype without gradients."""

    loss: Tensor
    #: The mean over the tokens, with `beta`.
    kl: Tensor | None
    #: The mean over the tokens, if entropies are given.
    entropy: Tensor | None
    #: Of the tokens (of the sequences, where they have one importance weight), the part whose weight is clipped from
    #: below, from above, and either; and the smallest and largest of these parts among the sequences with tokens.
    #: None for "sapo" and "vespo", which do not clip; "cispo" clips from above.
    clip_ratio_low_mean: Tensor | None
    clip_ratio_low_min: Tensor | None
    clip_ratio_high_mean: Tensor | None
    clip_ratio_high_max: Tensor | None
    clip_ratio_region_mean: Tensor | None


def grpo(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    *,
    entropies: Tensor | None = None,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    sampling_per_token_logps: Tensor | None = None,
    importance_sampling_ratio: Tensor | None = None,
    beta: float = 0.0,
    kl_estimator: str = "k3",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    gradient_accumulation_steps: int = 1,
    entropy_coef: float = 0.0,
    top_entropy_quantile: float = 1.0,
    off_policy_mask_threshold: float | None = None,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    return_metrics: bool = False,
) -> Any:
    r"""Group relative policy optimisation: clipped importance weights times advantages, and a KL penalty.

    Of each token, with :math:`r = \pi / \pi_\mathrm{old}` and the sequence's advantage A

    .. math:: \ell = -\min(r A, \mathrm{clip}(r, 1 - \epsilon, 1 + \epsilon_\mathrm{high}) A)
       + \beta \left(e^{d} - d - 1\right), \quad d = \log \pi_\mathrm{ref} - \log \pi

    Where the clipped product is the smaller one, r has no gradient, however large it is. If A is negative, r has no
    upper bound but `delta`, and :math:`e^d` never has one. Where such a number overflows (:math:`e^{89}` in float32),
    the loss is infinite, and its gradients are not finite. Wherever the loss is finite, its gradients are too.

    Args:
        log_probs: ``[B, T]``, the policy's log-probabilities of the tokens of a completion for each row.
        mask: ``[B, T]``, nonzero where a token counts.
        advantages: ``[B]``, or ``[B, T]`` for one for each token. See :func:`group_advantages`.
        entropies: ``[B, T]``, of the policy's distributions, for `entropy_coef`, `top_entropy_quantile` and metrics.
        old_per_token_logps: ``[B, T]``, of the policy that sampled. None: those of this call, without a gradient.
        ref_per_token_logps: ``[B, T]``, of the reference policy. Needed if `beta` is not 0.
        sampling_per_token_logps: ``[B, T]``, the sampler's own, for `off_policy_mask_threshold`; NaN counts as equal.
        importance_sampling_ratio: ``[B, T]`` or ``[B, 1]``, factors of the loss without the KL penalty, such as those
            of :func:`sampling_correction`.
        beta: the factor of the KL penalty.
        kl_estimator: "k3", the formula above; "k1", -d; "k2", d²/2; "unbiased", k3 times r.
        epsilon, epsilon_high: the clip range; None for the same on both sides.
        delta: an upper bound of r where it is not clipped ("two-sided" GRPO), or None. Of the types that clip r.
        loss_type: what each token adds, and what the sum is divided by. The formula above: "grpo" divides by each
            sequence's length, then by the number of sequences; "bnpo" by the number of tokens of the call; "dr_grpo" by
            B * `max_completion_length`; "dapo" by `num_items_in_batch`, or the number of tokens of the call; "luspo" by
            B. Others: "cispo", -A log pi times r up to `epsilon_high`, without r's gradient, divided like "dapo";
            "sapo", r replaced by 4 / t sigmoid(t (r - 1)), like "grpo"; "vespo", -A log pi times e^l w^k e^(-l w) of
            the sequence's weight w, like "dapo"; "gmpo", r the geometric mean of a sequence's weights, their logarithms
            clipped to -epsilon .. epsilon_high, like "grpo"; "rloo", r the product of a sequence's weights, clipped,
            like "grpo".
        importance_sampling_level: "token"; "sequence" for GSPO, r is the geometric mean over the sequence's tokens;
            "sequence_token", the same value with each token's own gradient. "vespo", "gmpo", "rloo": "token".
        max_completion_length: for "dr_grpo", at least 1.
        num_items_in_batch: for "dapo", "cispo", "vespo", the tokens of all micro-batches of a step, divided by the
            number of devices. A number or a tensor of one. If it is 0 though a token counts, the loss is infinite.
        gradient_accumulation_steps: the loss of the other types, and the entropy, are divided by it.
        entropy_coef: this times the mean entropy is subtracted from the loss.
        top_entropy_quantile: below 1, only this part of the call's tokens, those of the largest entropy, have a policy
            loss and an entropy bonus. The KL penalty stays on all.
        off_policy_mask_threshold: a sequence with a negative advantage has no policy loss if the mean of
            log pi_sampling - log pi exceeds this.
        sapo_temperature_pos, sapo_temperature_neg: t of "sapo", by the advantage's sign.
        vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: k and l of "vespo", by the advantage's sign.
        return_metrics: whether to return :class:`PolicyMetrics`.

    Returns:
        A scalar of log_probs' dtype, or :class:`PolicyMetrics` with it. 0, with gradients of 0, if no token counts,
        also with a `num_items_in_batch` of 0.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300; Yu et al., "DAPO", 2025, arXiv:2503.14476; Liu et al.,
    "Understanding R1-Zero-Like Training", 2025, arXiv:2503.20783 (Dr. GRPO); Zheng et al., "GSPO", 2025,
    arXiv:2507.18071; MiniMax, "MiniMax-M1", 2025, arXiv:2506.13585 (CISPO); Gao et al., "Soft Adaptive Policy
    Optimization", 2025, arXiv:2511.20347; Zhao et al., "Geometric-Mean Policy Optimization", 2025, arXiv:2507.20673;
    Ahmadian et al., "Back to Basics", 2024, arXiv:2402.14740 (RLOO); DeepSeek-AI, "DeepSeek-V3.2", 2025,
    arXiv:2512.02556 (off-policy mask, unbiased KL). "luspo" and "vespo": TRL 1.16.
    """
    shape = shape_of(log_probs, mask)
    check_choice("loss_type", loss_type, tuple(LOSS_TYPES))
    check_choice("importance_sampling_level", importance_sampling_level, LEVELS)
    check_choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    if loss_type in ("vespo", "gmpo", "rloo") and importance_sampling_level != "token":
        raise ValueError(f"loss_type {loss_type!r} needs importance_sampling_level 'token'")
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type 'dr_grpo' needs max_completion_length")
        check_int("max_completion_length", max_completion_length, minimum=1)
    if num_items_in_batch is not None:
        check_items(num_items_in_batch)
    check_int("gradient_accumulation_steps", gradient_accumulation_steps, minimum=1)
    check_number("beta", beta)
    if beta != 0.0 and ref_per_token_logps is None:
        raise ValueError(f"beta={beta} needs ref_per_token_logps, the log-probabilities of the reference policy")
    check_not_negative("epsilon", epsilon)
    if epsilon_high is None and loss_type == "cispo":
        raise ValueError("loss_type 'cispo' needs epsilon_high, the largest importance weight")
    high = epsilon if epsilon_high is None else epsilon_high
    (check_positive if loss_type == "cispo" else check_not_negative)("epsilon_high", high)
    if delta is not None:
        check_positive("delta", delta)
        if loss_type in ("cispo", "sapo", "vespo", "gmpo"):
            raise ValueError(f"loss_type {loss_type!r} has no delta; got {delta}")
    check_number("entropy_coef", entropy_coef)
    if not 0.0 < top_entropy_quantile <= 1.0:
        raise ValueError(f"top_entropy_quantile must be in 0 .. 1, above 0; got {top_entropy_quantile}")
    if off_policy_mask_threshold is not None:
        check_number("off_policy_mask_threshold", off_policy_mask_threshold)
    for name, value in {
        "sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg,
        "vespo_k_pos": vespo_k_pos, "vespo_lambda_pos": vespo_lambda_pos, "vespo_k_neg": vespo_k_neg,
        "vespo_lambda_neg": vespo_lambda_neg,
    }.items():  # fmt: skip
        check_positive(name, value)
    check_tensor("advantages", advantages)
    check_shape("advantages", advantages, shape[:1] if advantages.dim() == 1 else shape, "[B] or [B, T]")
    for name, given in (
        ("old_per_token_logps", old_per_token_logps), ("ref_per_token_logps", ref_per_token_logps),
        ("sampling_per_token_logps", sampling_per_token_logps),
    ):  # fmt: skip
        if given is not None:
            check_rows(name, given, shape)
    if importance_sampling_ratio is not None:
        check_tensor("importance_sampling_ratio", importance_sampling_ratio)
        if tuple(importance_sampling_ratio.shape) not in (shape, (shape[0], 1)):
            raise ValueError(f"importance_sampling_ratio must be [B, T] or [B, 1] of [B, T] = {list(shape)}")

    tokens = tokens_of(log_probs, mask, entropies)
    if tokens.entropies is None and (entropy_coef != 0.0 or top_entropy_quantile < 1.0):
        raise ValueError("entropy_coef and top_entropy_quantile need entropies")
    logps, counts = tokens.log_probs, tokens.counts

    # What does not count is replaced before the arithmetic: 0 * NaN would be NaN, in the gradient too.
    def counted(x: Tensor | None) -> Tensor:
        return logps.detach() if x is None else torch.where(counts, x.detach().to(logps.dtype), 0.0)

    each_log_ratio = logps - counted(old_per_token_logps)
    per_token = advantages.to(logps.dtype) if advantages.dim() == 2 else advantages.to(logps.dtype).unsqueeze(-1)
    advantages = torch.where(counts, per_token, 0.0)
    ratio = None if importance_sampling_ratio is None else importance_sampling_ratio.detach().to(logps.dtype)
    log_ratio = level_of(each_log_ratio, tokens, importance_sampling_level, loss_type)
    acting = tokens if top_entropy_quantile == 1.0 else _of_top_entropy(tokens, top_entropy_quantile)
    clipped_low, clipped_high = None, None
    if loss_type == "cispo":
        clipped_high = (log_ratio > math.log(high)) & (per_token > 0.0)
        each = -log_ratio.detach().clamp(max=math.log(high)).exp() * advantages * logps
    elif loss_type == "sapo":
        t = _by_sign(advantages > 0.0, sapo_temperature_pos, sapo_temperature_neg, logps)
        # Beyond this the sigmoid is 1 in every bit; the derivative of an exponential that overflows would be 0 * inf.
        bounded = torch.minimum(log_ratio, torch.log1p(100.0 / t))
        each = -advantages * torch.sigmoid(t * torch.expm1(bounded)) * 4.0 / t
    elif loss_type == "vespo":
        k = _by_sign(advantages >= 0.0, vespo_k_pos, vespo_k_neg, logps)
        rate = _by_sign(advantages >= 0.0, vespo_lambda_pos, vespo_lambda_neg, logps).clamp(min=1e-4)
        each = -vespo_weight(each_log_ratio.detach(), ratio, k, rate, counts) * advantages * logps
    else:
        low, top = (-epsilon, high) if loss_type == "gmpo" else (_log(1.0 - epsilon), math.log1p(high))
        if loss_type == "gmpo":
            clipped = torch.where(advantages >= 0.0, each_log_ratio.clamp(max=top), each_log_ratio.clamp(min=low))
            log_weight = (torch.where(acting.counts, clipped, 0.0).sum(-1) / acting.lengths).unsqueeze(-1)
        else:
            log_weight = clipped_weight(log_ratio, advantages, low, top, delta)
        bound = math.inf if delta is None else math.log(delta)
        clipped_low = (log_ratio.clamp(max=bound) < low) & (per_token < 0.0)
        clipped_high = (log_ratio.clamp(max=bound) > top) & (per_token > 0.0)
        each = -advantages * log_weight.exp()
    if off_policy_mask_threshold is not None:
        behind = sampling_per_token_logps if sampling_per_token_logps is not None else old_per_token_logps
        drift = torch.nan_to_num(counted(behind) - logps.detach(), nan=0.0).sum(-1) / tokens.lengths
        each = torch.where((advantages >= 0.0) | (drift <= off_policy_mask_threshold).unsqueeze(-1), each, 0.0)
    if loss_type != "gmpo":
        each = torch.where(acting.counts, each, 0.0)
    if ratio is not None and loss_type != "vespo":
        each = each * torch.where(counts, ratio, 0.0)
    kl = None
    if beta != 0.0:
        kl = kl_of(counted(ref_per_token_logps) - logps, kl_estimator, log_ratio)
        each = each + beta * kl
    each = torch.where(counts, each, 0.0)

    kind = LOSS_TYPES[loss_type]
    if kind == "sequences":
        loss = mean(each.sum(-1) / tokens.lengths)
    elif kind == "constant":
        assert max_completion_length is not None
        loss = mean(each.sum(-1)) / max_completion_length
    elif kind == "sums":
        loss = mean(each.sum(-1))
    elif kind == "items" and num_items_in_batch is not None:
        loss = over_items(each.sum(), num_items_in_batch).reshape(())
    else:
        loss = each.sum() / counts.sum().clamp(min=1)
    if kind != "items":
        loss = loss / gradient_accumulation_steps
    if entropy_coef != 0.0:
        assert acting.entropies is not None
        loss = loss - entropy_coef * acting.mean(acting.entropies) / gradient_accumulation_steps
    if not return_metrics:
        return loss
    parts = _clip_ratios(tokens, clipped_low, clipped_high)
    return PolicyMetrics(loss, None if kl is None else tokens.mean(kl.detach()), tokens.entropy(), *parts)


@from_hidden(grpo)
def grpo_loss(hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, **options: Any) -> Any:
    """:func:`grpo` of hidden states ``[B, T, D]``, a completion for each row, the head's `weight` ``[V, D]`` and the
    tokens `target` ``[B, T]``. It computes entropies itself, without another matmul, where an option or metrics need
    them.

    Args:
        options: those of :func:`grpo` and of the head, see :mod:`foundry_kernels.losses`.
    """


def ppo_policy(
    log_probs: Tensor,
    mask: Tensor,
    advantages: Tensor,
    old_per_token_logps: Tensor,
    *,
    entropies: Tensor | None = None,
    cliprange: float = 0.2,
    **options: Any,
) -> Any:
    r"""PPO's clipped policy term, the mean over the tokens that count of :math:`-\min(r A, \mathrm{clip}(r) A)`.

    Args:
        log_probs, mask, advantages, entropies, options: as for :func:`grpo`.
        old_per_token_logps: ``[B, T]``, of the policy that sampled.
        cliprange: r is clipped to 1 - cliprange .. 1 + cliprange.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347.
    """
    check_tensor("old_per_token_logps", old_per_token_logps)
    options = {"epsilon": cliprange, "loss_type": "bnpo", **options}
    return grpo(log_probs, mask, advantages, old_per_token_logps=old_per_token_logps, entropies=entropies, **options)


@from_hidden(ppo_policy)
def ppo_policy_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, advantages: Tensor, old_per_token_logps: Tensor, **options: Any
) -> Any:
    """:func:`ppo_policy` of hidden states, see :func:`grpo_loss`."""


def _of_top_entropy(tokens: Tokens, quantile: float) -> Tokens:
    """Keeps the tokens whose entropy is at least the quantile 1 - `quantile` of all that count."""
    assert tokens.entropies is not None
    if not tokens.counts.numel():
        return tokens
    found = torch.where(tokens.counts, tokens.entropies.detach().float(), math.nan)
    return tokens._replace(counts=found >= torch.nanquantile(found, 1.0 - quantile))


def _clip_ratios(tokens: Tokens, low: Tensor | None, high: Tensor | None) -> list[Tensor | None]:
    """`PolicyMetrics`' clip ratios."""

    def by_sequence(x: Tensor) -> Tensor:
        return x[:, 0] if x.shape[1] == 1 else torch.where(tokens.counts, x, 0.0).sum(-1) / tokens.lengths

    some, dtype = tokens.counts.any(-1), tokens.log_probs.dtype
    parts: list[Tensor | None] = [None] * 5
    if low is not None:
        parts[0] = tokens.mean(low.to(dtype))
        parts[1] = _extreme(torch.where(some, by_sequence(low.to(dtype)), math.inf), torch.amin)
    if high is not None:
        parts[2] = tokens.mean(high.to(dtype))
        parts[3] = _extreme(torch.where(some, by_sequence(high.to(dtype)), -math.inf), torch.amax)
    if low is not None and high is not None:
        parts[4] = tokens.mean((low | high).to(dtype))
    return parts


def _extreme(x: Tensor, which: Any) -> Tensor:
    """The largest or smallest of ``[B]``, 0 if there is none."""
    return torch.nan_to_num(which(x), posinf=0.0, neginf=0.0) if x.shape[0] else x.sum()


def _by_sign(positive: Tensor, one: float, other: float, like: Tensor) -> Tensor:
    return torch.where(positive, like.new_full((), one), like.new_full((), other))


def _log(x: float) -> float:
    return math.log(x) if x > 0.0 else -math.inf
