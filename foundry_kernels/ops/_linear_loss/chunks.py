"""The chunked strategy: one matmul computes a chunk's logits, and two more its gradients if they are needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear import linear
from foundry_kernels.ops._linear_loss import sizes
from foundry_kernels.ops._linear_loss.problem import (
    ALL,
    GRADIENTS,
    TILES,
    Call,
    Chunk,
    Inputs,
    Needs,
    Problem,
    mean_of,
    total_weight,
)
from foundry_kernels.ops._products import accumulate, fast_products, multiply, own_products
from foundry_kernels.ops._sums import sum_of
from foundry_kernels.ops.cross_entropy.tokens import NO_CLASS

#: Classes whose 16-bit weights or gradients are widened at a time on a CPU: the copy stays in the cache.
_CLASSES = 4096


def rows_of(x: Tensor, part: slice) -> Tensor:
    """x[part]; quicker."""
    return x.narrow(0, part.start, part.stop - part.start)


#: sum += a b, of bfloat16 in float32; and high, low += a^T b, where the sum is a bfloat16 and 8 bits more.
accumulate_product = extension.operator("accumulate_product_")
accumulate_product24 = extension.operator("accumulate_product24_")


def rounds(hidden: Tensor, weight: Tensor, options: Problem) -> bool:
    """Whether chunks on a CPU leave the gradients rounded to the dtype of hidden, which takes no sum in float32. Small
    ones may as well be exact until they are multiplied by the loss's own."""
    exact = hidden.dtype != torch.bfloat16 or options.batch_invariant or accumulate_product24 is None
    return not exact and hidden.numel() * weight.shape[0] > sizes.SMALL


def gradient_dtypes(
    hidden: Tensor, weight: Tensor, options: Problem, cpu: bool
) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    """The dtypes of hidden's, weight's and bias's gradients after the chunks of a reduced loss. On a GPU a matmul
    rounds hidden's, and weight's too if there is a single chunk. In float16 that would overflow before the division by
    the number of tokens."""
    low, wide = hidden.dtype, wide_dtype(hidden.dtype)
    if cpu:
        return (low, low, low) if rounds(hidden, weight, options) else (wide, wide, wide)
    return low, low if options.chunk_size == ALL and low != torch.float16 else wide, wide


def dtype_of_products(x: Tensor, n_classes: int) -> torch.dtype:
    """Returns the dtype of the logits' matmuls on a CPU. A small matmul is fast in either dtype, and float32 does not
    round its logits."""
    small = x.numel() * n_classes <= sizes.SMALL
    return wide_dtype(x.dtype) if small or not fast_products(x.dtype) else x.dtype


class Pair(NamedTuple):
    """The rows of low and the classes of up in the dtype of the matmuls. Where that has fewer bits, each is split: the
    rounded value in a first part of columns, what that lost in another. So one matmul multiplies them with 16 bits
    instead of 8: ``[low, rest of low, low] [up, up, rest of up]^T``."""

    low: Tensor
    up: Tensor

    @classmethod
    def of(cls, low: Tensor, up: Tensor, dtype: torch.dtype) -> Pair:
        if all(x.dtype == dtype or dtype.itemsize > 2 for x in (low, up)):
            return cls(low.to(dtype), up.to(dtype))
        (a, rest_a), (b, rest_b) = ((x.to(dtype), (x - x.to(dtype)).to(dtype)) for x in (low, up))
        return cls(torch.cat([a, rest_a, a], 1), torch.cat([b, b, rest_b], 1))

    def rows(self, part: slice) -> Pair:
        return self._replace(low=rows_of(self.low, part))

    def classes(self, first: int, n: int) -> Pair:
        return self._replace(up=self.up.narrow(0, first, n))


def make_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: float, out: Tensor, pair: Pair | None = None
) -> None:
    """out = scale (x weight^T + bias + low up^T), in the forward and the backward pass alike: lse is that of the same
    logits. They are rounded before they are scaled, as by PyTorch's operations."""
    if bias is None:
        multiply(x, weight.t(), out)
    elif own_products(x):
        multiply(x, weight.t(), out.copy_(bias.expand_as(out)), add=True)
    else:
        torch.addmm(bias, x, weight.t(), out=out)
    if pair is not None:
        multiply(pair.low, pair.up.t(), out, add=True)
    if scale != 1.0:
        out.mul_(scale)


class Tokens:
    """The tokens of a call as rows of matrices. On the CPU those that are ignored are left out, and 16-bit values
    become float32 unless 16-bit matmuls are faster; on a GPU nothing depends on the values of the targets."""

    def __init__(self, inputs: Inputs, options: Problem, cpu: bool) -> None:
        hidden, weight, target, bias, low, up = inputs
        self.dtype, self.n_rows, self.rank = wide_dtype(hidden.dtype), target.numel(), target.dim()
        self.target = target.reshape(-1)
        x = hidden.reshape(-1, hidden.shape[-1])
        counts = self.target != options.ignore_index
        low = None if low is None else low.reshape(-1, low.shape[-1])
        self.kept: Tensor | None = None
        #: How many count; None where it is not known.
        self.n_counted: int | None = None
        if not cpu or torch.compiler.is_compiling():
            x = x.masked_fill(~counts.unsqueeze(1), 0.0)
            low = None if low is None else low.masked_fill(~counts.unsqueeze(1), 0.0)
        else:
            self.n_counted = int(counts.count_nonzero())
            if self.n_counted != self.n_rows:
                self.kept = counts.nonzero().squeeze(1)
                x, self.target = x[self.kept], self.target[self.kept]
                low = None if low is None else low[self.kept]
        self.batch_invariant = options.batch_invariant
        within = hidden.dtype
        if cpu:  # by the number of tokens, if it may
            within = self.dtype if self.batch_invariant else dtype_of_products(x, weight.shape[0])
        #: Whether the weight's gradient is summed in 24 bits; and whether float32 matmuls copy the weights of a few
        #: classes at a time.
        self.sums24 = cpu and not torch.compiler.is_compiling() and rounds(hidden, weight, options)
        self.widens = within != weight.dtype and (self.sums24 or options.chunk_size == TILES)
        self.x, self.weight = x.to(within), weight if self.widens else weight.to(within)
        self.bias = None if bias is None else bias.to(within)
        self.low, self.up = low, up
        self.pair = None if low is None or up is None else Pair.of(low, up, within)
        self.cpu, self.chunk_size, self.one_chunk = cpu, options.chunk_size or None, options.chunk_size == ALL
        self.gradient_dtypes = gradient_dtypes(hidden, weight, options, cpu)
        #: The factor of logits and their gradient. As `alpha` it is part of the matmuls and costs nothing.
        self.logit_scale = options.logit_scale
        self.alpha = 1.0 if cpu or self.batch_invariant else options.logit_scale
        self.memory: Tensor | None = None

    def chunks(self) -> list[slice]:
        n, size = self.target.numel(), self.chunk_size
        if size is None:
            size = sizes.tokens_of_a_chunk(n, self.x.element_size(), self.sums24)
        size = max(n, 1) if self.one_chunk else int(size)
        return [slice(i, min(n, i + size)) for i in range(0, n, size)]

    def weights(self) -> Iterator[tuple[int, Tensor]]:
        """The first class and the weights of some classes, in the dtype of the matmuls: all classes, or a few at a
        time."""
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
            if self.pair is not None:
                y += linear(rows_of(self.pair.low, part), self.pair.up)
            return y if self.logit_scale == 1.0 else y.mul_(self.logit_scale)
        if self.memory is None:
            self.memory = x.new_empty((x.shape[0], self.weight.shape[0]))
        y = self.memory.narrow(0, 0, x.shape[0])
        for first, w in self.weights():
            bias = None if self.bias is None else self.bias.narrow(0, first, w.shape[0])
            pair = None if self.pair is None else self.pair.rows(part).classes(first, w.shape[0])
            make_logits(x, w, bias, self.logit_scale, y.narrow(1, first, w.shape[0]), pair)
        return y

    def scale_gradients(self, dlogits: Tensor) -> None:
        """Multiplies by `logit_scale`, unless the matmuls do."""
        if self.alpha != self.logit_scale:
            dlogits.mul_(self.logit_scale)

    def of_kept(self, of_all: Tensor) -> Tensor:
        """Values of the kept tokens, as a vector or as rows, from those of all."""
        rows = of_all.reshape(self.n_rows, *of_all.shape[self.rank :])
        return rows if self.kept is None else rows[self.kept]

    def whole(self, of_kept: Tensor, others: float = 0.0) -> Tensor:
        """Values of the kept tokens, and `others` for those that are not."""
        if self.kept is None:
            return of_kept
        return of_kept.new_full((self.n_rows, *of_kept.shape[1:]), others).index_copy_(0, self.kept, of_kept)


class Gradients:
    """The requested gradients of hidden, weight and bias, in the dtypes of `gradient_dtypes`; on a CPU in the dtype of
    the arithmetic. With a sum in 24 bits, two are bfloat16: hidden's, to which nothing is added, and the weight's,
    which has the first 16 bits of the sum until the last chunk."""

    def __init__(self, tokens: Tokens, needs: Needs) -> None:
        n_classes, width = tokens.weight.shape
        self.tokens, self.needs = tokens, needs
        of_hidden, of_weight, _ = tokens.gradient_dtypes
        if tokens.cpu:
            of_hidden = of_weight = torch.bfloat16 if tokens.sums24 else tokens.dtype
        self.dx = tokens.x.new_empty(tokens.x.shape if needs.hidden else (0,), dtype=of_hidden)
        #: Whether the first chunk's part of the weight's gradient is yet to be written to memory that holds nothing.
        self.is_new = tokens.target.numel() > 0 and not torch.compiler.is_compiling()
        if tokens.cpu:
            self.is_new &= not tokens.batch_invariant and (tokens.sums24 or tokens.x.dtype == of_weight)
        self.dweight = self.low = tokens.x.new_empty((0,), dtype=of_weight)
        if needs.weight:
            self.dweight = (self.low.new_empty if self.is_new else self.low.new_zeros)((n_classes, width))
        self.dbias = self.dx.new_zeros(n_classes if needs.bias else 0, dtype=tokens.dtype)
        self.of_pair = PairGradients(tokens, needs)

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
        tokens, needs, x = self.tokens, self.needs, rows_of(self.tokens.x, part)
        tokens.scale_gradients(dlogits)
        if needs.hidden and (tokens.cpu or tokens.batch_invariant):
            rows_of(self.dx, part).copy_(self.times_weight(dlogits))
        elif needs.hidden:
            accumulate(rows_of(self.dx, part), dlogits, tokens.weight, tokens.alpha, new=True)
        if needs.weight and tokens.cpu:
            self._add_to_weight_on_a_cpu(part, dlogits, x)
        elif needs.weight:
            accumulate(self.dweight, dlogits.t(), x, tokens.alpha, new=self.is_new)
            self.is_new = False
        if needs.bias:
            self.dbias.add_(dlogits.sum(0, dtype=self.dbias.dtype), alpha=tokens.alpha)
        self.of_pair.add(part, dlogits, 0)

    def _add_to_weight_on_a_cpu(self, part: slice, dlogits: Tensor, x: Tensor) -> None:
        tokens, n = self.tokens, self.tokens.target.numel()
        if tokens.batch_invariant:
            self.dweight += linear(dlogits.t(), x.t())
        elif tokens.sums24 and not (part == slice(0, n) and dlogits.dtype == self.dweight.dtype):
            if self.is_new:
                self.low = torch.empty_like(self.dweight, dtype=torch.uint8)
            accumulate_product24(self.dweight, self.low, dlogits, x, self.is_new, part.stop == n)
        elif self.is_new:
            multiply(dlogits.t(), x, self.dweight)  # spares the zeros, and reading them
        elif dlogits.dtype == self.dweight.dtype:
            multiply(dlogits.t(), x, self.dweight, add=True)
        else:
            # A 16-bit matmul would round the part of each chunk. A few classes at a time keep the copy small.
            x = x.to(tokens.dtype)
            for total, d in zip(self.dweight.split(_CLASSES), dlogits.split(_CLASSES, 1), strict=True):
                multiply(d.to(tokens.dtype).t(), x, total, add=True)
        self.is_new = False

    def of(self, inputs: Inputs, rounded: bool = False) -> tuple[Tensor, ...]:
        """Returns the gradients, those of hidden, weight and bias `rounded` to the dtype of hidden or as they are."""
        hidden = inputs.hidden
        dhidden = self.tokens.whole(self.dx).view(hidden.shape) if self.needs.hidden else self.dx
        found = (dhidden, self.dweight, self.dbias)
        return *((g.to(hidden.dtype) for g in found) if rounded else found), *self.of_pair.of(inputs)


class PairGradients:
    """The requested gradients of low and up, summed in the dtype of the arithmetic, in which a CPU multiplies them
    too."""

    def __init__(self, tokens: Tokens, needs: Needs) -> None:
        self.tokens, self.needs = tokens, needs
        empty = tokens.x.new_empty(0, dtype=tokens.dtype)
        self.dlow, self.dup = empty, empty.clone()
        if tokens.low is None or tokens.up is None:
            return
        if needs.low:
            self.dlow = empty.new_zeros(tokens.low.shape)
        if needs.up:
            self.dup = empty.new_zeros(tokens.up.shape)
        #: The terms of low and of up that a matmul takes.
        self.lows, self.ups = (self._terms(x) for x in (tokens.low, tokens.up))

    def _terms(self, x: Tensor) -> tuple[Tensor, ...]:
        tokens = self.tokens
        dtype = tokens.dtype if tokens.cpu or tokens.batch_invariant else tokens.x.dtype
        if x.dtype == dtype or dtype.itemsize > 2:
            return (x.to(dtype),)
        return x.to(dtype), (x - x.to(dtype)).to(dtype)

    def add(self, part: slice, dlogits: Tensor, first: int) -> None:
        """Adds the part of some tokens' logits of the classes from `first` on."""
        if not (self.needs.low or self.needs.up):
            return
        step = _CLASSES if self.tokens.cpu else max(dlogits.shape[1], 1)  # widened where it is in the cache
        for start, d in zip(range(0, dlogits.shape[1], step), dlogits.split(step, 1), strict=True):
            classes, d = slice(first + start, first + start + d.shape[1]), d.to(self.lows[0].dtype)
            if self.needs.low:
                self._add(rows_of(self.dlow, part), d, [rows_of(up, classes) for up in self.ups])
            if self.needs.up:
                self._add(rows_of(self.dup, classes), d.t(), [rows_of(low, part) for low in self.lows])

    def _add(self, total: Tensor, dlogits: Tensor, terms: list[Tensor]) -> None:
        for term in terms:
            if self.tokens.batch_invariant:
                total += linear(dlogits, term.t())
            else:
                accumulate(total, dlogits, term, self.tokens.alpha)

    def of(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        if not self.needs.low or inputs.low is None:
            return self.dlow, self.dup
        return self.tokens.whole(self.dlow).view(inputs.low.shape), self.dup


def forward(call: Call) -> dict[str, Tensor]:
    """The wanted results; and with `call.needs` the gradients, each chunk's right behind its logits."""
    _, rows, inputs, options, needs, wanted = call
    tokens = Tokens(inputs, options, rows.cpu)
    gradients = Gradients(tokens, needs) if any(needs) else None
    total = total_of(call, tokens)
    # The gradients include the mean's divisor at once, except in float16, where small values would underflow.
    late = tokens.x.dtype == torch.float16
    one = torch.ones((), dtype=tokens.dtype, device=inputs.hidden.device)
    share = one
    if isinstance(total, int):
        share = one / max(total, 1)
    elif total is not None:
        share = total.reciprocal().masked_fill(total == 0, 0.0)
    found: list[dict[str, Tensor]] = []
    for part in tokens.chunks():
        chunk = Chunk(part, tokens.logits(part), rows_of(tokens.target, part))
        dloss = None if gradients is None else (one if late else share).expand(chunk.target.shape)
        found.append(rows.forward(chunk, wanted, dloss))
        if gradients is not None:
            gradients.add(part, chunk.logits)
        del chunk
    if not found:
        dtypes = dict.fromkeys(call.loss.classes, torch.int64)
        found.append({name: one.new_empty(0, dtype=dtypes.get(name)) for name in wanted})
    of_tokens = found[0] if len(found) == 1 else {name: torch.cat([each[name] for each in found]) for name in wanted}
    results = outputs(call, tokens, total, of_tokens)
    if gradients is None:
        return results
    rounded = rows.cpu and rounds(inputs.hidden, inputs.weight, options)
    scale = share.clone() if late else one
    return results | dict(zip(GRADIENTS, (scale, *gradients.of(inputs, rounded)), strict=True))


def total_of(call: Call, tokens: Tokens) -> Tensor | int | None:
    """Returns what a mean divides by; None where there is none."""
    options, class_weight = call.options, call.rows.class_weight
    if options.reduction != "mean":
        return None
    if class_weight is None and tokens.n_counted is not None:
        return tokens.n_counted
    return total_weight(tokens.target, class_weight, options.ignore_index, tokens.dtype)


def outputs(call: Call, tokens: Tokens, total: Tensor | int | None, of_tokens: dict[str, Tensor]) -> dict[str, Tensor]:
    """The wanted results of the forward pass, from each token's."""
    found, reduces = {}, call.options.reduction != "none"
    for name in call.wanted:
        x = of_tokens[name]
        if reduces and name in call.loss.reduced:
            found[name] = sum_of(x) * 1.0 if total is None else mean_of(x, total)
        else:
            found[name] = tokens.whole(x, NO_CLASS if name in call.loss.classes else 0.0).view(call.inputs.target.shape)
    return found


def backward(call: Call, dloss: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    """The gradients of tokens' losses, each of which has a gradient of its own."""
    _, rows, inputs, options, needs, _ = call
    tokens = Tokens(inputs, options, rows.cpu)
    gradients = Gradients(tokens, needs)
    of_rows = [tokens.of_kept(x) for x in (dloss, *saved)]
    for part in tokens.chunks():
        d, *of_part = (rows_of(x, part) for x in of_rows)
        chunk = Chunk(part, tokens.logits(part), rows_of(tokens.target, part))
        rows.gradients_(chunk, d, tuple(of_part), 0)
        gradients.add(part, chunk.logits)
    # A copy where nothing else was written, so that an output is never an input.
    return gradients.of(inputs, rounded=True)
