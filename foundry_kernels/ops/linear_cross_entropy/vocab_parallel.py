"""The loss over sharded classes; see `_linear_loss/vocab_parallel.py`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss.chunks import rows_of
from foundry_kernels.ops._linear_loss.vocab_parallel import OwnClasses


class CrossEntropyOfOwnClasses(OwnClasses):
    name = "linear_cross_entropy"
    supported = (
        "ignore_index", "reduction", "label_smoothing", "z_loss", "softcap", "logit_scale", "chunk_size",
        "token_scaling", "batch_invariant", "return_lse", "return_z_loss", "return_predictions",
    )  # fmt: skip
    differentiable = ("loss", "lse")

    def forward(self) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        options, of_target = self.options, self.of_target
        y, nll, smooth = self.statistics(smooth=options.label_smoothing > 0.0, predict=options.return_predictions)
        lse = y + nll
        z = of_target * options.z_loss * lse.square()
        loss = of_target * (1.0 - options.label_smoothing) * nll + z
        if smooth is not None:
            loss = loss + (options.label_smoothing / self.shards.n_classes) * (smooth * self.counts)
        loss = loss.masked_fill(self.unknown, torch.nan)  # on a GPU
        if options.token_scaling:
            loss, z = loss * torch.exp(-nll), z * torch.exp(-nll)
        return {"loss": loss, "lse": lse * self.counts, "z_loss": z, "predicted": self.predicted}, (y, nll)

    def of_rows(self, given: dict[str, Tensor | None], *saved: Tensor) -> Callable[[slice, Tensor], Tensor]:
        """See the mathematics in `cross_entropy/__init__`. An lse with a gradient adds it times the probability of each
        class."""
        (y, nll), options = saved, self.options
        dloss, dlse = given["loss"], given.get("lse")
        d = torch.where(self.counts, torch.zeros_like(nll) if dloss is None else dloss, 0.0)
        d = d.masked_fill(self.unknown, torch.nan)
        if options.token_scaling:
            d = d * torch.where(self.counts, torch.exp(-nll), 0.0)
        epsilon, share = options.label_smoothing, options.label_smoothing / self.shards.n_classes
        certain = (1.0 - epsilon) * self.of_target
        beside = share * self.sum_of_weights + 2.0 * options.z_loss * self.of_target * (y + nll)
        of_weights = share * self.own_weights()
        from_lse = None if dlse is None else torch.where(self.counts, dlse, 0.0)

        def dlogits(part: slice, logits: Tensor) -> Tensor:
            mine, column = rows_of(self.mine, part), rows_of(self.column, part)
            c, e, f, at, each = (rows_of(x, part).unsqueeze(1) for x in (certain, beside, nll, y, d))
            p = logits.sub_(at).sub_(f).exp_()
            more = None if from_lse is None else p * rows_of(from_lse, part).unsqueeze(1)
            own = c * torch.expm1(-f) + e * p.gather(1, column)
            p.mul_(c + e).scatter_(1, column, torch.where(mine.unsqueeze(1), own, p.gather(1, column)))
            if epsilon > 0.0:
                p.sub_(of_weights)
            p.mul_(each)
            return p if more is None else p.add_(more)

        return dlogits
