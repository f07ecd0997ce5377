"""The chunked strategy over any cross-entropy kernel: a chunk's logits are made by one product; its gradients, where
they are wanted, by two more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear import linear
from foundry_kernels.ops._products import fast_products, multiply, own_products
from foundry_kernels.ops.cross_entropy.tokens import NO_CLASS, predictions, probabilities
from foundry_kernels.ops.linear_cross_entropy.calls import (
    Inputs,
    Needs,
    Outputs,
    Saves,
    mean_of,
    total_weight,
)
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions

#: Tokens of a chunk, if not given: at least so many, and at most this fraction of all where logits are of 4 bytes. On a
#: CPU each chunk reads and writes the whole sum of the weight's gradient, and a product takes longer for fewer tokens:
#: but a sum in 24 bits takes little, and has chunks of its own size.
_LEAST, _LEAST_CPU, _SHARE = 64, 512, 16
_SUMMED = 256
#: Classes whose 16-bit weights or gradients are widened at a time: the copy stays in the cache. On a GPU, those of
#: which a part of the weight's gradient exists beside it.
_CLASSES = 4096


def rows_of(x: Tensor, part: slice) -> Tensor:
    """x[part]; quicker."""
    return x.narrow(0, part.start, part.stop - part.start)


#: sum += a b, of bfloat16 in float32; and high, low += a^T b, where the sum is a bfloat16 and 8 bits more.
accumulate_product = extension.operator("accumulate_product_")
accumulate_product24 = extension.operator("accumulate_product24_")


#: Multiplications up to which the CPU computes logits of 16-bit inputs in float32.
_SMALL = 1 << 22


def default_size(n_tokens: int, itemsize: int, cpu: bool = False) -> int:
    """Tokens of a chunk, for logits of so many bytes each."""
    return max(_LEAST_CPU if cpu else _LEAST, -(-n_tokens // (_SHARE * itemsize // 4)))


def rounds(hidden: Tensor, weight: Tensor, options: LinearLossOptions) -> bool:
    """Whether chunks on a CPU leave the gradients rounded to the dtype of hidden, which takes no sum in float32. Small
    ones may as well be exact until they are multiplied by the loss's own."""
    exact = hidden.dtype != torch.bfloat16 or options.batch_invariant or accumulate_product24 is None
    return not exact and hidden.numel() * weight.shape[0] > _SMALL


def dtype_of_products(x: Tensor, n_classes: int) -> torch.dtype:
    """Returns the dtype of the logits' products on a CPU. A small product takes no time in either dtype, and float32
    does not round its logits."""
    small = x.numel() * n_classes <= _SMALL
    return wide_dtype(x.dtype) if small or not fast_products(x.dtype) else x.dtype


def make_logits(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """out = x weight^T + bias, in the forward and the backward pass alike: lse is that of the same logits."""
    if bias is None:
        multiply(x, weight.t(), out)
    elif own_products(x):
        multiply(x, weight.t(), out.copy_(bias.expand_as(out)), add=True)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class Tokens:
    """The tokens of a call as rows of matrices. On the CPU those that are ignored are left out, and 16-bit values
    become float32 where products are not faster without; on a GPU nothing depends on what the targets are."""

    def __init__(self, inputs: Inputs, options: LinearLossOptions, cpu: bool) -> None:
        hidden, weight, target, bias, _ = inputs
        self.dtype, self.n_rows = wide_dtype(hidden.dtype), target.numel()
        self.target = target.reshape(-1)
        x = hidden.reshape(-1, hidden.shape[-1])
        counts = self.target != options.ignore_index
        self.kept: Tensor | None = None
        #: How many count; None where it is not known.
        self.n_counted: int | None = None
        if not cpu or torch.compiler.is_compiling():
            x = x.masked_fill(~counts.unsqueeze(1), 0.0)
        else:
            self.n_counted = int(counts.count_nonzero())
            if self.n_counted != self.n_rows:
                self.kept = counts.nonzero().squeeze(1)
                x, self.target = x[self.kept], self.target[self.kept]
        self.batch_invariant = options.batch_invariant
        within = hidden.dtype
        if cpu:  # by the number of tokens, if it may
            within = self.dtype if self.batch_invariant else dtype_of_products(x, weight.shape[0])
        #: Whether the weight's gradient is summed in 24 bits; and whether, products being in float32, few classes at a
        #: time have a copy of their weights.
        self.sums24 = cpu and not torch.compiler.is_compiling() and rounds(hidden, weight, options)
        self.widens = self.sums24 and within != weight.dtype
        self.x, self.weight = x.to(within), weight if self.widens else weight.to(within)
        self.bias = None if bias is None else bias.to(within)
        self.logit_scale, self.cpu, self.chunk_size = options.logit_scale, cpu, options.chunk_size or None
        self.one_chunk = options.one_chunk
        self.memory: Tensor | None = None

    def chunks(self) -> list[slice]:
        n, size = self.target.numel(), self.chunk_size
        if size is None:
            size = _SUMMED if self.sums24 else default_size(n, self.x.element_size(), self.cpu)
        size = max(n, 1) if self.one_chunk else int(size)
        return [slice(i, min(n, i + size)) for i in range(0, n, size)]

    def weights(self) -> Iterator[tuple[int, Tensor]]:
        """The first class and the weights of some, in the dtype of the products: of all, or of few at a time."""
        if not self.widens:
            yield 0, self.weight
            return
        for i, w in enumerate(self.weight.split(_CLASSES)):
            yield i * _CLASSES, w.to(self.x.dtype)

    def logits(self, part: slice) -> Tensor:
        """Returns a chunk's logits, in memory that the next chunk's are written to."""
        x = rows_of(self.x, part)
        if self.batch_invariant:
            y = linear(x, self.weight, self.bias)
            return y if self.logit_scale == 1.0 else y.mul_(self.logit_scale)
        if self.memory is None:
            self.memory = x.new_empty((x.shape[0], self.weight.shape[0]))
        y = self.memory.narrow(0, 0, x.shape[0])
        for first, w in self.weights():
            out = y.narrow(1, first, w.shape[0])
            make_logits(x, w, None if self.bias is None else self.bias.narrow(0, first, w.shape[0]), out)
        return y if self.logit_scale == 1.0 else y.mul_(self.logit_scale)

    def of_kept(self, of_all: Tensor) -> Tensor:
        """Values of the kept tokens, as a vector, from those of all."""
        rows = of_all.reshape(-1)
        return rows if self.kept is None else rows[self.kept]

    def whole(self, of_kept: Tensor, others: float = 0.0) -> Tensor:
        """Values of the kept tokens, and `others` for those that are not."""
        if self.kept is None:
            return of_kept
        return of_kept.new_full((self.n_rows, *of_kept.shape[1:]), others).index_copy_(0, self.kept, of_kept)


class Gradients:
    """What is wanted of the gradients of hidden, weight and bias, in the dtype of the arithmetic. With a sum in 24
    bits, hidden's, to which nothing is added, and the weight's, the first 16 bits of that sum until its last chunk, are
    in bfloat16."""

    def __init__(self, tokens: Tokens, needs: Needs) -> None:
        n_classes, width = tokens.weight.shape
        empty = tokens.x.new_empty((0,), dtype=torch.bfloat16 if tokens.sums24 else tokens.dtype)
        self.tokens, self.needs = tokens, needs
        self.dx = empty.new_empty(tokens.x.shape) if needs.hidden else empty
        #: Whether the first chunk's part of the weight's gradient is yet to be written to memory that holds nothing.
        self.is_new = (
            tokens.cpu
            and not tokens.batch_invariant
            and tokens.target.numel() > 0
            and (tokens.sums24 or tokens.x.dtype == empty.dtype)
            and not torch.compiler.is_compiling()
        )
        self.dweight = self.low = empty
        if needs.weight:
            self.dweight = (empty.new_empty if self.is_new else empty.new_zeros)((n_classes, width))
        self.dbias = empty.new_zeros(n_classes, dtype=tokens.dtype) if needs.bias else empty

    def times_weight(self, dlogits: Tensor) -> Tensor:
        if self.tokens.batch_invariant:
            return linear(dlogits, self.tokens.weight.t())
        weights = self.tokens.weights()
        _, w = next(weights)
        total = multiply(dlogits.narrow(1, 0, w.shape[0]), w)
        for first, w in weights:
            multiply(dlogits.narrow(1, first, w.shape[0]), w, total, add=True)
        return total

    def add(self, part: slice, dlogits: Tensor) -> None:
        tokens, needs = self.tokens, self.needs
        if tokens.logit_scale != 1.0:
            dlogits.mul_(tokens.logit_scale)
        if needs.hidden:
            rows_of(self.dx, part).copy_(self.times_weight(dlogits))
        alone = part == slice(0, tokens.target.numel())
        if needs.weight and tokens.batch_invariant and tokens.cpu:
            self.dweight += linear(dlogits.t(), rows_of(tokens.x, part).t())
        elif needs.weight and tokens.sums24 and not (alone and dlogits.dtype == self.dweight.dtype):
            if self.is_new:
                self.low = torch.empty_like(self.dweight, dtype=torch.uint8)
            last = part.stop == tokens.target.numel()
            accumulate_product24(self.dweight, self.low, dlogits, rows_of(tokens.x, part), self.is_new, last)
            self.is_new = False
        elif needs.weight and self.is_new:
            multiply(dlogits.t(), rows_of(tokens.x, part), self.dweight)  # spares the zeros, and reading them
            self.is_new = False
        elif needs.weight and dlogits.dtype == self.dweight.dtype:
            multiply(dlogits.t(), rows_of(tokens.x, part), self.dweight, add=True)
        elif needs.weight:
            # torch's product of 16 bits would round the part of each chunk. Some classes at a time, for the copy's
            # sake.
            wide, x = dlogits.device.type == "cuda", rows_of(tokens.x, part)
            x = x if wide else x.to(tokens.dtype)
            for total, d in zip(self.dweight.split(_CLASSES), dlogits.split(_CLASSES, 1), strict=True):
                if wide:
                    total += torch.mm(d.t(), x, out_dtype=tokens.dtype)
                else:
                    multiply(d.to(tokens.dtype).t(), x, total, add=True)
        if needs.bias:
            self.dbias += dlogits.sum(0, dtype=self.dbias.dtype)

    def of(self, hidden: Tensor, rounded: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the gradients, `rounded` to the dtype of hidden or as they are."""
        dhidden = self.tokens.whole(self.dx).view(hidden.shape) if self.needs.hidden else self.dx
        if rounded:
            return dhidden.to(hidden.dtype), self.dweight.to(hidden.dtype), self.dbias.to(hidden.dtype)
        return dhidden, self.dweight, self.dbias


class Kernels(NamedTuple):
    """The operators of a cross-entropy, of which the backward one may write to the logits; and whether values may be
    looked at (see `Tokens`)."""

    forward: Any
    backward: Any
    cpu: bool


def forward(kernels: Kernels, inputs: Inputs, options: LinearLossOptions, saves: Saves, needs: Needs) -> Outputs:
    """The loss; and with `needs` the gradients, each chunk's right behind its logits."""
    tokens, class_weight = Tokens(inputs, options, kernels.cpu), inputs.class_weight
    gradients = Gradients(tokens, needs) if any(needs) else None
    per_token = options.of_logits("none").operator_args()
    total: Tensor | int | None = None
    if options.reduction == "mean" and class_weight is None and tokens.n_counted is not None:
        total = tokens.n_counted
    elif options.reduction == "mean":
        total = total_weight(tokens.target, class_weight, options.ignore_index, tokens.dtype)
    # The mean's divisor goes into the gradients at once, but for float16, which would lose what is below its range.
    late = tokens.x.dtype == torch.float16
    one = torch.ones((), dtype=tokens.dtype, device=inputs.hidden.device)
    share = one
    if isinstance(total, int):
        share = one / max(total, 1)
    elif total is not None:
        share = total.reciprocal().masked_fill(total == 0, 0.0)
    stats = saves.stats or gradients is not None
    found: list[tuple[Tensor, ...]] = []
    predicted: list[Tensor] = []
    for part in tokens.chunks():
        target, logits = rows_of(tokens.target, part), tokens.logits(part)
        loss, lse, low, z, _ = kernels.forward(
            logits, target, class_weight, *per_token, saves.lse or stats or options.token_scaling, saves.z_loss, stats
        )
        dloss = (one if late else share).expand(target.shape)
        if options.token_scaling:
            p = probabilities(logits, target, lse, options.ignore_index, options.softcap)
            loss, z, dloss = loss * p, z * p if saves.z_loss else z, dloss * p
        if saves.predicted:
            predicted.append(predictions(logits, target, options.ignore_index))
        found.append((loss, lse, low, z))
        if gradients is not None:
            dlogits = kernels.backward(dloss, logits, target, class_weight, lse, low, None, *per_token)
            del logits
            gradients.add(part, dlogits)
            del dlogits

    def rows(column: int) -> Tensor:
        if len(found) == 1:
            return found[0][column]
        return torch.cat([each[column] for each in found]) if found else one.new_empty(0)

    def predictions_of_all() -> Tensor:
        of_kept = torch.cat(predicted) if predicted else tokens.target.new_empty(0, dtype=torch.int64)
        return tokens.whole(of_kept, NO_CLASS).view(inputs.target.shape)

    def whole(column: int) -> Tensor:
        return tokens.whole(rows(column)).view(inputs.target.shape)

    def reduced(column: int) -> Tensor:
        if options.reduction == "none":
            return whole(column)
        return rows(column).sum() * 1.0 if total is None else mean_of(rows(column), total)

    def absent() -> Tensor:
        return one.new_empty(0)

    rounded = kernels.cpu and rounds(inputs.hidden, inputs.weight, options)
    return Outputs(
        reduced(0),
        whole(1) if saves.lse else absent(),
        whole(2) if saves.stats else absent(),
        reduced(3) if saves.z_loss else absent(),
        absent() if gradients is None else share.clone() if late else one,
        *((absent(), absent(), absent()) if gradients is None else gradients.of(inputs.hidden, rounded)),
        predictions_of_all() if saves.predicted else absent().long(),
    )


def backward(
    kernels: Kernels, dloss: Tensor, inputs: Inputs, lse: Tensor, lse_low: Tensor, options: LinearLossOptions,
    needs: Needs,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of tokens' losses, each of which has a gradient of its own."""
    tokens, hidden = Tokens(inputs, options, kernels.cpu), inputs.hidden
    gradients = Gradients(tokens, needs)
    of_rows = [tokens.of_kept(x) for x in (dloss, lse, lse_low)]
    per_token = options.of_logits("none").operator_args()
    for part in tokens.chunks():
        d, each, low = (rows_of(x, part) for x in of_rows)
        logits, target = tokens.logits(part), rows_of(tokens.target, part)
        if options.token_scaling:
            d = d * probabilities(logits, target, each, options.ignore_index, options.softcap)
        gradients.add(part, kernels.backward(d, logits, target, inputs.class_weight, each, low, None, *per_token))
    # A copy where nothing else was written, so that an output is never an input.
    return tuple(g.to(hidden.dtype) for g in gradients.of(hidden))
