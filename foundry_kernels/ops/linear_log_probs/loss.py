"""What the engine in `_linear_loss` needs to know of log-probabilities. The backward pass computes the logits once
more."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss.problem import Loss
from foundry_kernels.ops.linear_log_probs.options import LinearLogProbsOptions
from foundry_kernels.ops.log_probs.options import STATS, by_name, row_gradients


def _rows_of(given: Mapping[str, Tensor | None], values: Mapping[str, Tensor]) -> Tensor:
    """The numbers g, c and b of each token (`log_probs.options.row_gradients`); c and b may be left out."""
    rows = row_gradients(given["log_probs"], given["entropy"], given["lse"], values["entropy"], values["lse"])
    return torch.stack([x for x in rows if x is not None], -1)


def numbers(drows: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """g, c and b of rows that `_rows_of` made."""
    g, *rest = drows.unbind(-1)
    c, b = (*rest, None, None)[:2]
    return g, c, b


def results(log_probs: Tensor, entropy: Tensor, lse: Tensor, lse_low: Tensor, stats: Tensor) -> dict[str, Tensor]:
    """The results by name of an operator or a kernel of `log_probs`; stats may be empty."""
    found = {"log_probs": log_probs, "entropy": entropy, "lse": lse, "lse_low": lse_low}
    return found | by_name(stats if stats.dim() > 1 else None)


LOSS = Loss(
    "linear_log_probs",
    LinearLogProbsOptions,
    outputs=("log_probs", "entropy", "lse", "lse_low", *STATS),
    flags={name: f"save_{name}" for name in ("entropy", "lse", "lse_low", *STATS)},
    saved=("lse", "lse_low"),
    differentiable=("entropy", "lse"),
    rows_of=_rows_of,
)
