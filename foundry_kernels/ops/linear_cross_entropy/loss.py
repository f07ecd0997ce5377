"""What the engine in `_linear_loss` needs to know of this loss: the names of its results, the kernel of its rows, the
gradient of an lse, and how tiles scale the loss of each token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops._linear_loss.chunks import dtype_of_products
from foundry_kernels.ops._linear_loss.operators import BACKENDS
from foundry_kernels.ops._linear_loss.problem import (
    GRADIENTS,
    TILES,
    Chunk,
    Inputs,
    Loss,
    Needs,
    RowKernel,
    mean_of,
    total_weight,
)
from foundry_kernels.ops.cross_entropy.tokens import (
    NO_CLASS,
    known_targets,
    predictions,
    probabilities,
    probabilities_of,
)
from foundry_kernels.ops.linear_cross_entropy.options import LinearCrossEntropyOptions

#: Tokens of which rows of the weight are gathered at a time.
_ROWS = 2048


class CrossEntropyRows(RowKernel):
    """The cross-entropy of logits that exist. A backend computes `rows` and `rows_backward_`."""

    def __init__(self, inputs: Inputs, constants: tuple[Tensor | None, ...], options: Any) -> None:
        super().__init__(inputs, constants, options)
        (self.class_weight,) = constants
        self.of_logits = options.of_logits("none")

    def rows(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        """Computes `forward` without predictions and token scaling."""
        raise NotImplementedError

    def rows_backward_(self, chunk: Chunk, dloss: Tensor, lse: Tensor, lse_low: Tensor, first: int) -> None:
        """Computes `gradients_` without token scaling."""
        raise NotImplementedError

    def row_blocks(self, target: Tensor, wanted: frozenset[str], dtype: torch.dtype) -> Any:
        """Computes `blocks` without predictions."""
        raise NotImplementedError

    def forward(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        _, logits, target = chunk
        scales = self.options.token_scaling
        predicted = predictions(logits, target, self.options.ignore_index) if "predicted" in wanted else None
        needed = wanted | {"lse"} if scales else wanted
        if dloss is not None:
            needed = needed | {"lse", "lse_low"}
        found = self.rows(chunk, needed, None if scales else dloss)
        if predicted is not None:
            found["predicted"] = predicted
        if scales:
            p = self._probabilities(chunk, found["lse"])
            found |= {name: found[name] * p for name in ("loss", "z_loss") if name in wanted}
            if dloss is not None:
                self.rows_backward_(chunk, dloss * p, found["lse"], found["lse_low"], 0)
        return found

    def gradients_(self, chunk: Chunk, dloss: Tensor, saved: tuple[Tensor, ...], first: int) -> None:
        lse, lse_low = saved
        if self.options.token_scaling:
            dloss = dloss * self._probabilities(chunk, lse)
        self.rows_backward_(chunk, dloss, lse, lse_low, first)

    def blocks(self, target: Tensor, wanted: frozenset[str], dtype: torch.dtype) -> Any:
        found = self.row_blocks(target, wanted, dtype)
        if "predicted" not in wanted:
            return found
        return _WithPredictions(found, known_targets(target, self.n_classes, self.options.ignore_index))

    def _probabilities(self, chunk: Chunk, lse: Tensor) -> Tensor:
        return probabilities(chunk.logits, chunk.target, lse, self.options.ignore_index, self.options.softcap)


class _WithPredictions:
    """Results of one block of classes after another, and the class of each token's largest logit."""

    def __init__(self, of_rows: Any, known: Tensor) -> None:
        self.of_rows, self.known = of_rows, known
        self.best: tuple[Tensor, Tensor] | None = None  # of each token the largest logit, and its class

    def add(self, logits: Tensor, first: int) -> None:
        largest, at = logits.max(1)
        at += first
        if self.best is not None:  # of equal ones the first
            greater = largest > self.best[0]
            largest, at = torch.where(greater, largest, self.best[0]), torch.where(greater, at, self.best[1])
        self.best = largest, at
        self.of_rows.add(logits, first)

    @property
    def results(self) -> dict[str, Tensor]:
        assert self.best is not None  # there is a class
        return self.of_rows.results | {"predicted": self.best[1].masked_fill(~self.known, NO_CLASS)}


def _around(
    results: Callable[..., dict[str, Tensor]], prefix: str, inputs: tuple[Tensor | None, ...],
    options: LinearCrossEntropyOptions, needs: Needs,
) -> dict[str, Tensor]:  # fmt: skip
    hidden, weight, target, bias, low, up, class_weight = inputs
    assert hidden is not None
    assert weight is not None
    assert target is not None
    if options.token_scaling and options.chunk_size == TILES:
        # The backward pass computes the logits again anyway, so a gradient for each token costs nothing.
        unscaled = options._replace(token_scaling=False, reduction="none", return_lse=True)
        found = _around(results, prefix, inputs, unscaled, needs)
        rounded = dtype_of_products(hidden, weight.shape[0]) if prefix == "" else hidden.dtype
        with torch.no_grad(), no_autocast(hidden):
            of_logits = Inputs(hidden, weight, target, bias, low, up)
            p = target_probabilities(of_logits, found["lse"], options, rounded)
        zs = found["z_loss"] if options.return_z_loss else None
        return found | scaled(found["loss"], zs, p, target, class_weight, options)
    found = results(inputs, options, needs)
    if options.return_lse and any(needs):
        of_logits = Inputs(hidden, weight, target, bias, low, up)
        lse = apply(_Lse, prefix, found["lse"], found["lse_low"], *of_logits, options)
        return found | {"lse": lse}
    return found


LOSS = Loss(
    "linear_cross_entropy",
    LinearCrossEntropyOptions,
    outputs=("loss", "lse", "lse_low", "z_loss", *GRADIENTS, "predicted"),
    constants=("class_weight",),
    flags={"lse": "save_lse", "z_loss": "save_z_loss", "lse_low": "save_stats", "predicted": "save_predicted"},
    saved=("lse", "lse_low"),
    reduced=("loss", "z_loss"),
    classes=("predicted",),
    around=_around,
)


class _Lse(torch.autograd.Function):
    """The lse of a call with its own gradient, which computes the logits once more: the backward operator of
    linear_log_probs. A function of its own, so that an lse without a gradient costs nothing, under torch.compile
    too."""

    @staticmethod
    def forward(
        ctx: Any, prefix: str, lse: Tensor, lse_low: Tensor, hidden: Tensor, weight: Tensor, target: Tensor,
        bias: Tensor | None, low: Tensor | None, up: Tensor | None, options: LinearCrossEntropyOptions,
    ) -> Tensor:  # fmt: skip
        _, _, _, need_dhidden, need_dweight, _, *others, _ = ctx.needs_input_grad
        ctx.prefix, ctx.needs = prefix, (need_dhidden, need_dweight, *others)
        ctx.options = (
            options.ignore_index, options.logit_scale, options.softcap, options.chunk_size, options.batch_invariant
        )  # fmt: skip
        ctx.save_for_backward(hidden, weight, target, bias, low, up, lse, lse_low)
        return lse.clone()

    @staticmethod
    def backward(ctx: Any, dlse: Tensor) -> Any:
        refuse_second_derivative("linear_cross_entropy")
        drows = torch.stack([torch.zeros_like(dlse), dlse], -1)
        backward = BACKENDS[ctx.prefix + "linear_log_probs"].backward
        found = backward(drows, *ctx.saved_tensors, *ctx.options, *ctx.needs)
        dhidden, dweight, *others = (x if n else None for x, n in zip(found, ctx.needs, strict=True))
        return None, None, None, dhidden, dweight, None, *others, None


def target_probabilities(
    inputs: Inputs, lse: Tensor, options: LinearCrossEntropyOptions, logits_dtype: torch.dtype
) -> Tensor:
    """Each target's probability ``[...]`` where there are no logits that it could be read from, which had this dtype
    when lse was made of them."""
    hidden, weight, target, bias, low, up = inputs
    known = known_targets(target, weight.shape[0], options.ignore_index)
    index = torch.where(known, target, 0).long()
    x, at = hidden.detach().reshape(-1, hidden.shape[-1]), index.reshape(-1)
    step = at.numel() if torch.compiler.is_compiling() else _ROWS  # a loop would fix the number of tokens
    rows = [
        (part.to(lse.dtype) * weight.detach()[i].to(lse.dtype)).sum(1)
        for part, i in zip(x.split(max(step, 1)), at.split(max(step, 1)), strict=True)
    ]
    picked = torch.cat(rows).view(target.shape)
    if bias is not None:
        picked = picked + bias.detach()[index].to(lse.dtype)
    if low is not None and up is not None:
        picked = picked + (low.detach().to(lse.dtype) * up.detach()[index].to(lse.dtype)).sum(-1)
    picked = (picked.to(logits_dtype) * options.logit_scale).to(lse.dtype)
    return probabilities_of(picked, known, lse, options.softcap)


def scaled(
    losses: Tensor, zs: Tensor | None, p: Tensor, target: Tensor, class_weight: Tensor | None,
    options: LinearCrossEntropyOptions,
) -> dict[str, Tensor]:  # fmt: skip
    """The losses of the tokens, and their z-losses where they are given, times p and reduced."""
    total = None
    if options.reduction == "mean":
        total = total_weight(target, class_weight, options.ignore_index, losses.dtype)

    def reduced(x: Tensor) -> Tensor:
        if options.reduction == "none":
            return x * p
        return (x * p).sum() if total is None else mean_of(x * p, total)

    return {name: reduced(x) for name, x in (("loss", losses), ("z_loss", zs)) if x is not None}
