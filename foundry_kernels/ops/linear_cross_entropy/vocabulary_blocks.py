"""The backward pass of tiles on the CPU: all tokens against a block of the vocabulary, some of the classes, at a time.

A block's logits are made anew and become their own gradient, in place. Every row of the weight's gradient is complete
at once, being a sum over all tokens within one product, so no float32 copy of it exists; that of hidden is summed over
the classes in float32. Four products in all, where chunks of a reduced loss take three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._products import multiply
from foundry_kernels.ops.cross_entropy.native import cross_entropy_bwd_classes_
from foundry_kernels.ops.linear_cross_entropy.calls import Inputs, Needs, total_weight
from foundry_kernels.ops.linear_cross_entropy.chunks import accumulate_product, dtype_of_products, make_logits
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions

#: Logits that exist at a time, if these are of so many classes at least: enough for products to be fast.
_LOGITS, _LEAST = 1 << 21, 256


def backward(
    dloss: Tensor, inputs: Inputs, lse: Tensor, lse_low: Tensor, options: LinearLossOptions, needs: Needs
) -> tuple[Tensor, ...]:
    hidden, weight, target, bias, class_weight = inputs
    ignore_index, reduction, logit_scale = options.ignore_index, options.reduction, options.logit_scale
    wanted = ((hidden.shape, needs.hidden), (weight.shape, needs.weight), (weight.shape[:1], needs.bias))
    dhidden, dweight, dbias = (hidden.new_zeros(shape if needed else (0,)) for shape, needed in wanted)
    wide, n_classes, target = wide_dtype(hidden.dtype), weight.shape[0], target.reshape(-1)
    kept = (target != ignore_index).nonzero().squeeze(1)  # a token that is ignored may hold anything
    x = hidden.reshape(-1, hidden.shape[-1])[kept]
    x = x.to(dtype_of_products(x, n_classes))  # as the forward pass, whose lse is that of the same logits
    factor = None
    if reduction == "mean":
        total = total_weight(target, class_weight, ignore_index, wide)
        dloss = (dloss / total).masked_fill(total == 0, 0.0)
    if x.dtype == torch.float16 and reduction != "none":  # which would lose what is below its range
        factor, dloss = dloss, torch.ones_like(dloss)
    of_rows = [each.reshape(-1).expand(target.shape)[kept] for each in (dloss, lse, lse_low)]
    target = target[kept]
    n = target.numel()
    if n == 0:
        return dhidden, dweight, dbias
    dx = x.new_zeros(x.shape if needs.hidden else (0,), dtype=wide)
    step = min(n_classes, max(_LEAST, _LOGITS // n))
    memory = x.new_empty(n * step)
    for first in range(0, n_classes, step):
        here = slice(first, min(n_classes, first + step))
        w = weight[here].to(x.dtype)
        logits = memory[: n * w.shape[0]].view(n, w.shape[0])
        make_logits(x, w, None if bias is None else bias[here].to(x.dtype), logits)
        if logit_scale != 1.0:
            logits *= logit_scale
        cross_entropy_bwd_classes_(
            logits, of_rows[0], target, class_weight, of_rows[1], of_rows[2], first, n_classes, ignore_index,
            options.label_smoothing, options.z_loss, options.softcap,
        )  # fmt: skip
        if logit_scale != 1.0:
            logits *= logit_scale
        if needs.hidden and x.dtype == torch.bfloat16 and accumulate_product is not None:
            accumulate_product(dx, logits, w)
        elif needs.hidden:
            multiply(logits.to(wide), w.to(wide), dx, add=True)
        if needs.weight:
            if factor is None and x.dtype == dweight.dtype:
                multiply(logits.t(), x, dweight[here])
            else:
                dweight[here] = _times(multiply(logits.t(), x), factor)
        if needs.bias:
            dbias[here] = _times(logits.sum(0, dtype=wide), factor)
    if needs.hidden:
        dhidden.view(-1, hidden.shape[-1])[kept] = _times(dx, factor).to(hidden.dtype)
    return dhidden, dweight, dbias


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
