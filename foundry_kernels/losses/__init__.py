"""Losses for post-training, from hidden states and the weight of the head: no logits are stored.

Each loss has two forms. `fk.losses.policy.grpo(log_probs, mask, ...)` takes the log-probabilities ``[B, T]`` of tokens,
from any engine, and a mask of those that count. `fk.losses.grpo_loss(hidden, weight, target, ...)` computes them first
(:func:`foundry_kernels.linear_log_probs`), and then has the same arguments. Tokens are rows of `hidden` ``[B, T, D]``,
and `target` ``[B, T]`` holds the token that each row predicts: shift the labels by one before the call. Tokens that do
not count (prompts, padding) are in no sum and no count: what hidden states, log-probabilities and advantages hold
there, NaN among it, changes no bit of a loss or a gradient.

To learn from a teacher, `gkd_loss` takes the hidden states of both models, and `fk.losses.distill.gkd` their logits.

`return_metrics=True` returns a named tuple: the loss, and what a trainer logs, from the same pass.

Options of the head: `bias`, `logit_scale` (1 / temperature), `softcap`, `ignore_index`, `chunk_size`, `batch_invariant`
and `backend`, as for :func:`foundry_kernels.linear_log_probs`.
"""

from foundry_kernels.losses.distill import gkd_loss, on_policy_batch, with_tail
from foundry_kernels.losses.dpo import dpo_loss
from foundry_kernels.losses.policy import grpo_loss, ppo_policy_loss
from foundry_kernels.losses.preference import cpo_loss, kto_loss, orpo_loss, simpo_loss
from foundry_kernels.losses.sampling import group_advantages, sampling_correction
from foundry_kernels.losses.sft import sft_loss

__all__ = [
    "cpo_loss",
    "dpo_loss",
    "gkd_loss",
    "group_advantages",
    "grpo_loss",
    "kto_loss",
    "on_policy_batch",
    "orpo_loss",
    "ppo_policy_loss",
    "sampling_correction",
    "sft_loss",
    "simpo_loss",
    "with_tail",
]
