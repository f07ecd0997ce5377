"""Log-probabilities over sharded classes; see `_linear_loss/vocab_parallel.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss.chunks import rows_of
from foundry_kernels.ops._linear_loss.vocab_parallel import OwnClasses
from foundry_kernels.ops.log_probs.options import STATS, row_gradients


class LogProbsOfOwnClasses(OwnClasses):
    name = "linear_log_probs"
    supported = (
        "ignore_index", "logit_scale", "softcap", "chunk_size", "batch_invariant", "return_entropy", "return_lse",
        "return_stats",
    )  # fmt: skip
    differentiable = ("log_probs", "entropy", "lse")

    def forward(self) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        stats = self.options.return_stats
        y, nll, entropy = self.statistics(entropy=self.options.return_entropy, stats=stats)
        entropy = torch.zeros_like(y) if entropy is None else entropy
        results = {"log_probs": -nll, "entropy": entropy, "lse": y + nll}
        if stats:
            results |= dict(zip(STATS, self.of_logits, strict=True))
        results = {name: (x * self.counts).masked_fill(self.unknown, torch.nan) for name, x in results.items()}
        return results, (y, nll, entropy)

    def of_rows(self, given: dict[str, Tensor | None], *saved: Tensor) -> Callable[[slice, Tensor], Tensor]:
        """See the mathematics in `log_probs/__init__`."""
        y, nll, entropy = saved
        rows = row_gradients(given["log_probs"], given.get("entropy"), given.get("lse"), entropy, nll)
        g, c, b = (
            None if x is None else torch.where(self.counts, x, 0.0).masked_fill(self.unknown, torch.nan) for x in rows
        )
        assert g is not None

        def dlogits(part: slice, logits: Tensor) -> Tensor:
            mine, column = rows_of(self.mine, part), rows_of(self.column, part)
            below = logits.sub_(rows_of(y, part).unsqueeze(1)).sub_(rows_of(nll, part).unsqueeze(1))
            p, each = below.exp(), rows_of(g, part).unsqueeze(1)
            at_target = torch.where(
                mine.unsqueeze(1), -torch.expm1(-rows_of(nll, part).unsqueeze(1)), -p.gather(1, column)
            )
            d = p.neg().scatter_(1, column, at_target).mul_(each)
            if c is not None:
                d.add_(p * rows_of(c, part).unsqueeze(1))
            if b is not None:
                d.add_(p * below.masked_fill_(below == -torch.inf, 0.0) * rows_of(b, part).unsqueeze(1))
            return d

        return dlogits
