"""What comes before a policy's loss: advantages of rewards, and the correction between sampler and trainer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_int, check_tensor
from foundry_kernels.losses.tokens import check_choice, check_rows, shape_of


def group_advantages(
    rewards: Tensor, num_generations: int, *, kind: str = "grpo", scale_rewards: str = "group"
) -> Tensor:
    """The advantages of completions, of which `num_generations` in a row answer one prompt.

    Args:
        rewards: ``[B]``, B a multiple of `num_generations`. A reward of NaN belongs to no mean and has an advantage of
            0.
        num_generations: at least 2.
        kind: "grpo", the reward minus the group's mean; "rloo", minus the mean of the others of the group;
            "reinforce_plus_plus", minus the mean of all, over the deviation of all.
        scale_rewards: for "grpo", what the difference is divided by, and 1e-4 added: the deviation (by n - 1)
            of the "group", of the "batch", or "none" (Dr. GRPO).

    Returns:
        ``[B]``, float32, or float64 for float64 rewards.
    """
    check_tensor("rewards", rewards)
    check_int("num_generations", num_generations, minimum=2)
    check_choice("kind", kind, ("grpo", "rloo", "reinforce_plus_plus"))
    check_choice("scale_rewards", scale_rewards, ("group", "batch", "none"))
    if rewards.dim() != 1 or rewards.shape[0] % num_generations:
        raise ValueError(f"rewards must be [B], B a multiple of {num_generations}; got shape {tuple(rewards.shape)}")
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    groups = rewards.view(-1, num_generations)
    if kind == "rloo":
        known = (~groups.isnan()).sum(1, keepdim=True)
        of_others = (groups.nansum(1, keepdim=True) - groups) / (known - 1).clamp(min=1)
        found = torch.where(known > 1, groups - of_others, 0.0).flatten()
    elif kind == "reinforce_plus_plus":
        found = (rewards - rewards.nanmean()) / (_deviation(rewards.unsqueeze(0)) + 1e-4).flatten()
    else:
        found = groups - groups.nanmean(1, keepdim=True)
        if scale_rewards != "none":
            found = found / (_deviation(groups if scale_rewards == "group" else rewards.unsqueeze(0)) + 1e-4)
        found = found.flatten()
    return torch.nan_to_num(found, nan=0.0)


class SamplingCorrection(NamedTuple):
    """Factors that correct for a sampler whose probabilities differ from the trainer's, and their statistics."""

    #: ``[B, T]``, or ``[B, 1]`` of sequences: `importance_sampling_ratio` of :func:`grpo`.
    ratio: Tensor
    #: Float32 scalars over the tokens that count (the sequences): of the ratio, and of the absolute differences of
    #: log-probabilities.
    ratio_min: Tensor
    ratio_mean: Tensor
    ratio_max: Tensor
    logp_difference_mean: Tensor
    logp_difference_max: Tensor


def sampling_correction(
    old_per_token_logps: Tensor,
    sampling_per_token_logps: Tensor,
    mask: Tensor,
    *,
    mode: str = "token_truncate",
    clip_min: float | None = None,
    clip_max: float | None = 3.0,
) -> SamplingCorrection:
    """The importance weights between a trainer's log-probabilities of sampled tokens and the sampler's own.

    Args:
        old_per_token_logps: ``[B, T]``, the trainer's, of the policy that sampled.
        sampling_per_token_logps: ``[B, T]``, the sampler's. A token for which it is NaN has the weight 1.
        mask: ``[B, T]``, nonzero where a token counts.
        mode: "token_truncate" or "sequence_truncate" clips the ratio of each token, or the product over a sequence, to
            the bounds; "token_mask" or "sequence_mask" sets a ratio beyond them to 0.
        clip_min, clip_max: the bounds; None for none.

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training", 2025 (truncated weights);
    TRL's `vllm_importance_sampling_mode`.
    """
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    check_choice("mode", mode, modes)
    shape = shape_of(old_per_token_logps, mask)
    check_rows("sampling_per_token_logps", sampling_per_token_logps, shape)
    counts = mask.bool()
    each = torch.where(counts, (old_per_token_logps - sampling_per_token_logps).detach().float(), 0.0)
    counted = counts & ~each.isnan()
    each = torch.nan_to_num(each, nan=0.0, posinf=math.inf, neginf=-math.inf)
    by_sequence = mode.startswith("sequence")
    ratio = (each.sum(-1, keepdim=True) if by_sequence else each).exp()
    if mode.endswith("truncate"):
        ratio = ratio if clip_min is None and clip_max is None else ratio.clamp(clip_min, clip_max)
    else:
        low, high = (-math.inf if clip_min is None else clip_min), (math.inf if clip_max is None else clip_max)
        ratio = torch.where((ratio < low) | (ratio > high), 0.0, ratio)
    which = counts.any(-1, keepdim=True) if by_sequence else counts

    def of(x: Tensor, among: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = (
            torch.where(among, x, math.inf).amin(), (torch.where(among, x, 0.0).sum() / among.sum().clamp(min=1)),
            torch.where(among, x, -math.inf).amax(),
        )  # fmt: skip
        least, middle, most = (torch.where(among.any(), value, 0.0) for value in found)
        return least, middle, most

    return SamplingCorrection(ratio, *of(ratio, which), *of(each.abs(), counted)[1:])


def _deviation(groups: Tensor) -> Tensor:
    """The standard deviation with n - 1 of each row, without its NaN; 0 of fewer than two numbers."""
    n = (~groups.isnan()).sum(1, keepdim=True)
    squares = (groups - groups.nanmean(1, keepdim=True)).square().nansum(1, keepdim=True)
    return (squares / (n - 1).clamp(min=1)).sqrt()
