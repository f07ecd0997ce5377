"""Policy gradients: GRPO and its variants, and PPO's policy term."""

from __future__ import annotations

import math
from typing import Unpack

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
from foundry_kernels.losses.tokens import HeadOptions, check_items, check_rows, mean, over_items, token_logps

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
LEVELS = ("token", "sequence")


def grpo_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    *,
    old_per_token_logps: Tensor | None = None,
    ref_per_token_logps: Tensor | None = None,
    beta: float = 0.0,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    loss_type: str = "dapo",
    importance_sampling_level: str = "token",
    max_completion_length: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    **head: Unpack[HeadOptions],
) -> Tensor:
    r"""Group relative policy optimisation: clipped importance weights times advantages, and a KL penalty.

    Of each token, with :math:`r = \pi / \pi_\mathrm{old}` and the sequence's advantage A

    .. math:: \ell = -\min(r A, \mathrm{clip}(r, 1 - \epsilon, 1 + \epsilon_\mathrm{high}) A)
       + \beta \left(e^{d} - d - 1\right), \quad d = \log \pi_\mathrm{ref} - \log \pi

    Where the clipped product is the smaller one, r has no gradient, however large it is. If A is negative, r has no
    upper bound but `delta`, and :math:`e^d` never has one. Where such a number overflows (:math:`e^{89}` in float32),
    the loss is infinite, and its gradients are not finite. Wherever the loss is finite, its gradients are too.

    Args:
        hidden: ``[B, T, D]``, a completion for each row. weight: ``[V, D]``. target: ``[B, T]``.
        advantages: ``[B]``, or ``[B, T]`` for one for each token.
        old_per_token_logps: ``[B, T]``, of the policy that sampled. None: those of this call, without a gradient.
        ref_per_token_logps: ``[B, T]``, of the reference policy. Needed if `beta` is not 0.
        beta: the factor of the KL penalty.
        epsilon, epsilon_high: the clip range; None for the same on both sides.
        delta: an upper bound of r where it is not clipped ("two-sided" GRPO), or None.
        loss_type: what the sum over tokens is divided by. "grpo": each sequence's length, then the number of sequences.
            "bnpo": the number of tokens of the call. "dr_grpo": B * `max_completion_length`. "dapo":
            `num_items_in_batch`, or the number of tokens of the call.
        importance_sampling_level: "token", or "sequence" for GSPO: r is the geometric mean over the sequence's tokens.
        max_completion_length: for "dr_grpo", at least 1.
        num_items_in_batch: for "dapo", the tokens of all micro-batches of a step, divided by the number of devices. A
            number or a tensor of one. If it is 0 though a token counts, the loss is infinite.
        head: see :mod:`foundry_kernels.losses`.

    Returns:
        A float32 scalar. 0, with gradients of 0, if no token counts, also with a `num_items_in_batch` of 0.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Shao et al., "DeepSeekMath", 2024, arXiv:2402.03300; Yu et al., "DAPO", 2025, arXiv:2503.14476; Liu et al.,
    "Understanding R1-Zero-Like Training", 2025, arXiv:2503.20783 (Dr. GRPO); Zheng et al., "GSPO", 2025,
    arXiv:2507.18071.
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type must be one of {', '.join(LOSS_TYPES)}; got {loss_type!r}")
    if importance_sampling_level not in LEVELS:
        raise ValueError(
            f"importance_sampling_level must be one of {', '.join(LEVELS)}; got {importance_sampling_level!r}"
        )
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type 'dr_grpo' needs max_completion_length")
        check_int("max_completion_length", max_completion_length, minimum=1)
    if num_items_in_batch is not None:
        check_items(num_items_in_batch)
    check_number("beta", beta)
    if beta != 0.0 and ref_per_token_logps is None:
        raise ValueError(f"beta={beta} needs ref_per_token_logps, the log-probabilities of the reference policy")
    logps, counts = token_logps(hidden, weight, target, **head)
    lengths = counts.sum(-1).clamp(min=1)
    # What does not count is replaced before the arithmetic: 0 * NaN would be NaN, in the gradient too.
    log_ratio = torch.where(counts, logps - _brought("old_per_token_logps", old_per_token_logps, logps), 0.0)
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio.sum(-1) / lengths).unsqueeze(-1)
    advantages = torch.where(counts, _per_token(advantages, logps), 0.0)
    each = -advantages * _clipped_ratio(log_ratio, advantages, epsilon, epsilon_high, delta)
    if beta != 0.0:
        d = torch.where(counts, _brought("ref_per_token_logps", ref_per_token_logps, logps) - logps, 0.0)
        each = each + beta * (torch.expm1(d) - d)
    if loss_type == "grpo":
        return mean(each.sum(-1) / lengths)
    if loss_type == "dr_grpo":
        assert max_completion_length is not None
        return mean(each.sum(-1)) / max_completion_length
    if loss_type == "dapo" and num_items_in_batch is not None:
        return over_items(each.sum(), num_items_in_batch).reshape(())
    return each.sum() / counts.sum().clamp(min=1)


def ppo_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    advantages: Tensor,
    old_per_token_logps: Tensor,
    *,
    cliprange: float = 0.2,
    **head: Unpack[HeadOptions],
) -> Tensor:
    r"""PPO's clipped policy term, the mean over the tokens that count of :math:`-\min(r A, \mathrm{clip}(r) A)`.

    Args:
        hidden: ``[B, T, D]``. weight: ``[V, D]``. target: ``[B, T]``.
        advantages: ``[B, T]``, or ``[B]`` for one for each sequence.
        old_per_token_logps: ``[B, T]``, of the policy that sampled.
        cliprange: r is clipped to 1 - cliprange .. 1 + cliprange.
        head: see :mod:`foundry_kernels.losses`.

    Returns:
        A float32 scalar. 0, with gradients of 0, if no token counts. Infinite where r overflows beside a negative
        advantage (:func:`grpo_loss`).

    Raises:
        TypeError, ValueError: an argument does not fit.

    Schulman et al., "Proximal Policy Optimization Algorithms", 2017, arXiv:1707.06347.
    """
    check_tensor("old_per_token_logps", old_per_token_logps)
    return grpo_loss(
        hidden, weight, target, advantages, old_per_token_logps=old_per_token_logps, epsilon=cliprange,
        loss_type="bnpo", **head,
    )  # fmt: skip


def _clipped_ratio(
    log_ratio: Tensor, advantages: Tensor, epsilon: float, epsilon_high: float | None, delta: float | None
) -> Tensor:
    """The ratio whose product with the advantage is the smaller one: bounded from above if the advantage is positive,
    from below and by `delta` if it is negative. Its logarithm is bounded: the gradient of an exponential that overflows
    would be 0 * inf where the bound is chosen."""
    check_not_negative("epsilon", epsilon)
    epsilon_high = epsilon if epsilon_high is None else epsilon_high
    check_not_negative("epsilon_high", epsilon_high)
    high, most = 1.0 + epsilon_high, math.inf
    if delta is not None:
        check_positive("delta", delta)
        high, most = min(high, delta), max(high, delta)
    low = math.log(1.0 - epsilon) if epsilon < 1.0 else -math.inf
    return torch.where(
        advantages >= 0.0, log_ratio.clamp(max=math.log(high)), log_ratio.clamp(low, math.log(most))
    ).exp()  # fmt: skip


def _per_token(advantages: Tensor, logps: Tensor) -> Tensor:
    """Advantages that broadcast to ``[B, T]``."""
    check_tensor("advantages", advantages)
    if advantages.dim() == 1:
        check_shape("advantages", advantages, (logps.shape[0],), "one for each sequence")
        return advantages.to(logps.dtype).unsqueeze(-1)
    check_shape("advantages", advantages, tuple(logps.shape), "one for each token or sequence")
    return advantages.to(logps.dtype)


def _brought(name: str, x: Tensor | None, logps: Tensor) -> Tensor:
    """Log-probabilities of another policy; None: those of this one, without a gradient."""
    if x is None:
        return logps.detach()
    check_rows(name, x, logps)
    return x.detach().to(logps.dtype)
