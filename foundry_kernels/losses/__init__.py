"""Losses for post-training, from hidden states and the weight of the head: no logits are stored.

Each is a few lines of PyTorch on :func:`foundry_kernels.linear_log_probs`. Tokens are rows of `hidden` ``[..., T, D]``,
and `target` ``[..., T]`` holds the token that each row predicts: shift the labels by one before the call. Tokens with
the target `ignore_index` (prompts, padding) are in no sum and no count: what hidden states, log-probabilities and
advantages hold there, NaN among it, changes no bit of a loss or a gradient.

Options that all have: `bias` of the head, `logit_scale` (1 / temperature), `softcap`, `ignore_index`, `chunk_size` and
`backend`, as for :func:`foundry_kernels.linear_log_probs`.
"""

from foundry_kernels.losses.policy import grpo_loss, ppo_policy_loss
from foundry_kernels.losses.preference import cpo_loss, dpo_loss, kto_loss, orpo_loss, simpo_loss
from foundry_kernels.losses.sft import sft_loss

__all__ = [
    "cpo_loss",
    "dpo_loss",
    "grpo_loss",
    "kto_loss",
    "orpo_loss",
    "ppo_policy_loss",
    "sft_loss",
    "simpo_loss",
]
