"""The options of one call of log_probs, made and checked in the public function and read by every backend; and the
numbers that its gradient depends on."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.options import Options

#: The results of `return_stats`, which kernels store beside each other in one tensor, stats ``[..., 3]``.
STATS = ("token_accuracy", "mean_logits", "log_sum_sq_probs")


class LogProbsOptions(
    Options, not_in_schema=("return_entropy", "return_lse", "return_stats"), schema_types={"ignore_index": "int"}
):
    ignore_index: int
    logit_scale: float
    softcap: float | None
    return_entropy: bool = False
    return_lse: bool = False
    return_stats: bool = False

    def requested(self, log_probs: Tensor, *others: Tensor) -> tuple[Tensor | None, ...]:
        """log_probs, entropy, lse and stats, with None for those that are not requested."""
        wanted = (self.return_entropy, self.return_lse, self.return_stats)
        return log_probs, *(x if w else None for x, w in zip(others, wanted, strict=True))


def by_name(stats: Tensor | None) -> dict[str, Tensor]:
    """The statistics in tensors of their own."""
    if stats is None:
        return {}
    dense = torch.contiguous_format
    return {name: x.clone(memory_format=dense) for name, x in zip(STATS, stats.unbind(-1), strict=True)}


def row_gradients(
    dlog_probs: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None, entropy: Tensor, like: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The numbers g, c and b of each token, by which its logits' gradient is ``[j = t] g + p_j (c - g + b (y_j -
    lse))`` (c and b: None for 0), from the gradients of the results, which are None for those that are not used."""
    g = torch.zeros_like(like) if dlog_probs is None else dlog_probs
    if dentropy is None:
        return g, dlse, None
    c = -dentropy * entropy
    return g, c if dlse is None else c + dlse, -dentropy
