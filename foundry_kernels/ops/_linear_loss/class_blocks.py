"""The form "tiles": all tokens with one block of classes at a time.

In the forward pass, a matmul computes a block's logits, and a kernel adds them to each token's running log-sum-exp, if
the backend can pass results from block to block (`RowKernel.has_blocks`); otherwise it is that of chunks. In the
backward pass, the same matmul computes the logits again, bit for bit, and they are overwritten by their gradient.
One matmul sums each row of the weight's gradient over all tokens, so no float32 copy of it exists. hidden's gradient is
summed over the classes in float32. There are four matmuls in all; chunks with a reduced loss need three.

No block is skipped for having small gradients ("Cut your losses" does): a row of the weight whose class is no target of
this step gets nothing but such gradients, and without them its own would be 0, wrong in every digit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss import sizes
from foundry_kernels.ops._linear_loss.chunks import (
    PairGradients,
    Tokens,
    accumulate_product,
    make_logits,
    outputs,
    total_of,
)
from foundry_kernels.ops._linear_loss.problem import Call, Chunk, total_weight
from foundry_kernels.ops._products import accumulate, multiply


def _blocks(tokens: Tokens) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """The classes of each block, their weights, and the logits of all tokens, in memory that the next block's take."""
    n, n_classes = tokens.target.numel(), tokens.weight.shape[0]
    step = min(n_classes, sizes.classes(tokens.cpu, max(n, 1), n_classes, tokens.x.element_size()))
    memory = tokens.x.new_empty(n * step)
    for first in range(0, n_classes, step):
        here = slice(first, min(n_classes, first + step))
        w = tokens.weight[here].to(tokens.x.dtype)
        logits = memory[: n * w.shape[0]].view(n, w.shape[0])
        bias = None if tokens.bias is None else tokens.bias[here]
        pair = None if tokens.pair is None else tokens.pair.classes(first, w.shape[0])
        make_logits(tokens.x, w, bias, tokens.logit_scale, logits, pair)
        yield here, w, logits


def forward(call: Call) -> dict[str, Tensor]:
    tokens = Tokens(call.inputs, call.options, call.rows.cpu)
    results = call.rows.blocks(tokens.target, call.wanted, tokens.dtype)
    for here, _, logits in _blocks(tokens):
        results.add(logits, here.start)
    return outputs(call, tokens, total_of(call, tokens), results.results)


def backward(call: Call, dloss: Tensor, *saved: Tensor) -> tuple[Tensor, ...]:
    _, rows, inputs, options, needs, _ = call
    hidden, weight = inputs.hidden, inputs.weight
    tokens = Tokens(inputs, options, rows.cpu)
    x, wide, alpha = tokens.x, tokens.dtype, tokens.alpha
    factor = None
    if options.reduction == "mean":
        total = total_weight(inputs.target, rows.class_weight, options.ignore_index, wide)
        dloss = (dloss / total).masked_fill(total == 0, 0.0)
    if x.dtype == torch.float16 and options.reduction != "none":  # which would lose what is below its range
        factor, dloss = dloss, torch.ones_like(dloss)
    if options.reduction != "none":
        dloss = dloss.expand(inputs.target.shape)
    d, *of_rows = (tokens.of_kept(each) for each in (dloss, *saved))
    dx = hidden.new_zeros(x.shape if needs.hidden else (0,), dtype=wide)
    made = hidden.new_empty if x.shape[0] else hidden.new_zeros  # if there is a token, every block is written
    dweight, dbias = made(weight.shape if needs.weight else (0,)), made(weight.shape[:1] if needs.bias else (0,))
    everything, of_pair = slice(0, x.shape[0]), PairGradients(tokens, needs)
    for here, w, logits in _blocks(tokens) if x.shape[0] else ():
        rows.gradients_(Chunk(everything, logits, tokens.target), d, tuple(of_rows), here.start)
        tokens.scale_gradients(logits)
        if needs.hidden and not rows.cpu:
            accumulate(dx, logits, w, alpha)
        elif needs.hidden and x.dtype == torch.bfloat16 and accumulate_product is not None:
            accumulate_product(dx, logits, w)
        elif needs.hidden:
            multiply(logits.to(wide), w.to(wide), dx, add=True)
        if needs.weight and rows.cpu:
            _gradient_on_a_cpu(logits, x, dweight[here], factor)
        elif needs.weight:
            out = dweight[here] if factor is None else torch.empty_like(dweight[here], dtype=wide)
            accumulate(out, logits.t(), x, alpha, new=True)
            if factor is not None:
                dweight[here] = out.mul_(factor)
        if needs.bias:
            dbias[here] = _times(logits.sum(0, dtype=wide).mul_(alpha), factor)
        of_pair.add(everything, logits, here.start)
    more = tuple(_times(g, factor) for g in of_pair.of(inputs))
    dhidden = _times(dx, factor).to(hidden.dtype)
    return tokens.whole(dhidden).view(hidden.shape) if needs.hidden else dhidden, dweight, dbias, *more


def _gradient_on_a_cpu(dlogits: Tensor, x: Tensor, out: Tensor, factor: Tensor | None) -> None:
    if factor is None and x.dtype == out.dtype:
        multiply(dlogits.t(), x, out)
    else:
        out.copy_(_times(multiply(dlogits.t(), x), factor))


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
