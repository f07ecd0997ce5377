"""The form "tiles": all tokens with one block of classes at a time.

In the forward pass, a matmul computes a block's logits, and a kernel adds them to each token's running log-sum-exp, if
the backend can pass losses from block to block (`Kernels.losses`); otherwise it is the forward pass of chunks. In the
backward pass, the same matmul computes the logits again, bit for bit, and they are overwritten by their gradient. One
matmul sums each row of the weight's gradient over all tokens, so no float32 copy of it exists. hidden's gradient is
summed over the classes in float32. There are four matmuls in all; chunks with a reduced loss need three.

No block is skipped for having small gradients ("Cut your losses" does): a row of the weight whose class is no target of
this step gets nothing but such gradients, and without them its own would be 0, wrong in every digit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from foundry_kernels.ops._products import accumulate, multiply
from foundry_kernels.ops.cross_entropy.tokens import NO_CLASS, known_targets
from foundry_kernels.ops.linear_cross_entropy.calls import Inputs, Kernels, Needs, Outputs, Saves, total_weight
from foundry_kernels.ops.linear_cross_entropy.chunks import Tokens, accumulate_product, make_logits, outputs, total_of
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions


def _blocks(kernels: Kernels, tokens: Tokens) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The classes of each block, their weights, and the logits of all tokens, in memory that the next block's take."""
    n, n_classes = tokens.target.numel(), tokens.weight.shape[0]
    step = min(n_classes, kernels.classes(max(n, 1), n_classes, tokens.x.element_size()))
    memory = tokens.x.new_empty(n * step)
    for first in range(0, n_classes, step):
        here = slice(first, min(n_classes, first + step))
        w = tokens.weight[here].to(tokens.x.dtype)
        logits = memory[: n * w.shape[0]].view(n, w.shape[0])
        make_logits(tokens.x, w, None if tokens.bias is None else tokens.bias[here], tokens.logit_scale, logits)
        yield here, w, logits


def forward(kernels: Kernels, inputs: Inputs, options: LinearLossOptions, saves: Saves) -> Outputs:
    tokens, n_classes = Tokens(inputs, options, kernels.cpu), inputs.weight.shape[0]
    save_lse = saves.lse or saves.stats
    losses = kernels.losses(
        tokens.target, n_classes, inputs.class_weight, options.of_logits("none"), tokens.dtype,
        save_lse, saves.z_loss, saves.stats,
    )  # fmt: skip
    best: tuple[Tensor, Tensor] | None = None  # of each token the largest logit, and its class
    for here, _, logits in _blocks(kernels, tokens):
        if saves.predicted:
            largest, at = logits.max(1)
            at += here.start
            if best is not None:  # of equal ones the first
                greater = largest > best[0]
                largest, at = torch.where(greater, largest, best[0]), torch.where(greater, at, best[1])
            best = largest, at
        losses.add(logits, here.start)
    predicted = None
    if best is not None:
        predicted = best[1].masked_fill_(~known_targets(tokens.target, n_classes, options.ignore_index), NO_CLASS)
    total = total_of(tokens, inputs.class_weight, options)
    return outputs(tokens, inputs, options, saves, total, losses.results, predicted)


def backward(
    kernels: Kernels, dloss: Tensor, inputs: Inputs, lse: Tensor, lse_low: Tensor, options: LinearLossOptions,
    needs: Needs,
) -> tuple[Tensor, ...]:  # fmt: skip
    hidden, weight, class_weight = inputs.hidden, inputs.weight, inputs.class_weight
    tokens, per_token = Tokens(inputs, options, kernels.cpu), options.of_logits("none")
    x, wide, alpha = tokens.x, tokens.dtype, tokens.alpha
    factor = None
    if options.reduction == "mean":
        total = total_weight(inputs.target, class_weight, options.ignore_index, wide)
        dloss = (dloss / total).masked_fill(total == 0, 0.0)
    if x.dtype == torch.float16 and options.reduction != "none":  # which would lose what is below its range
        factor, dloss = dloss, torch.ones_like(dloss)
    if options.reduction != "none":
        dloss = dloss.expand(inputs.target.shape)
    d, lse, lse_low = (tokens.of_kept(each) for each in (dloss, lse, lse_low))
    dx = hidden.new_zeros(x.shape if needs.hidden else (0,), dtype=wide)
    made = hidden.new_empty if x.shape[0] else hidden.new_zeros  # if there is a token, every block is written
    dweight, dbias = made(weight.shape if needs.weight else (0,)), made(weight.shape[:1] if needs.bias else (0,))
    for here, w, logits in _blocks(kernels, tokens) if x.shape[0] else ():
        kernels.gradients_(logits, d, tokens.target, class_weight, lse, lse_low, here.start, weight.shape[0], per_token)
        tokens.scale_gradients(logits)
        if needs.hidden and not kernels.cpu:
            accumulate(dx, logits, w, alpha)
        elif needs.hidden and x.dtype == torch.bfloat16 and accumulate_product is not None:
            accumulate_product(dx, logits, w)
        elif needs.hidden:
            multiply(logits.to(wide), w.to(wide), dx, add=True)
        if needs.weight and kernels.cpu:
            _gradient_on_a_cpu(logits, x, dweight[here], factor)
        elif needs.weight:
            out = dweight[here] if factor is None else torch.empty_like(dweight[here], dtype=wide)
            accumulate(out, logits.t(), x, alpha, new=True)
            if factor is not None:
                dweight[here] = out.mul_(factor)
        if needs.bias:
            dbias[here] = _times(logits.sum(0, dtype=wide).mul_(alpha), factor)
    dhidden = _times(dx, factor).to(hidden.dtype)
    return tokens.whole(dhidden).view(hidden.shape) if needs.hidden else dhidden, dweight, dbias


def _gradient_on_a_cpu(dlogits: Tensor, x: Tensor, out: Tensor, factor: Tensor | None) -> None:
    if factor is None and x.dtype == out.dtype:
        multiply(dlogits.t(), x, out)
    else:
        out.copy_(_times(multiply(dlogits.t(), x), factor))


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
