"""Plain PyTorch, with all logits, differentiated by autograd: what every other strategy must equal."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.ops._linear_loss.reference import all_logits
from foundry_kernels.ops.linear_log_probs.options import LinearLogProbsOptions
from foundry_kernels.ops.log_probs import reference
from foundry_kernels.ops.log_probs.options import by_name


def linear_log_probs(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    low: Tensor | None,
    up: Tensor | None,
    options: LinearLogProbsOptions,
) -> dict[str, Tensor | None]:
    logits = all_logits(hidden, weight, target, bias, low, up, options)
    log_probs, entropy, lse, stats = reference.log_probs(logits, target, options.of_logits())
    return {"log_probs": log_probs, "entropy": entropy, "lse": lse} | by_name(stats)
