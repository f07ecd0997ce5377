"""The backward pass on the CPU where `chunk_size` is 0: all tokens against some of the classes at a time.

Their logits are made anew and become their own gradient, in place. Every row of the weight's gradient is complete at
once, being a sum over all tokens within one product, so no float32 copy of it exists; that of hidden is summed over the
classes in float32. Four products in all, where chunks of a reduced loss take three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core import extension
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.linear_cross_entropy.chunks import accumulate_product, dtype_of_products, total_weight

#: Logits that exist at a time, if these are of so many classes at least: enough for products to be fast.
_LOGITS, _LEAST = 1 << 21, 256

_dlogits = extension.operator("cross_entropy_bwd_classes_")


def backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    lse: Tensor, lse_low: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float,
    softcap: float | None, logit_scale: float,
    need_dhidden: bool, need_dweight: bool, need_dbias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = ((hidden.shape, need_dhidden), (weight.shape, need_dweight), (weight.shape[:1], need_dbias))
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
    dx = x.new_zeros(x.shape if need_dhidden else (0,), dtype=wide)
    step = min(n_classes, max(_LEAST, _LOGITS // n))
    memory = x.new_empty(n * step)
    for first in range(0, n_classes, step):
        here = slice(first, min(n_classes, first + step))
        w = weight[here].to(x.dtype)
        logits = memory[: n * w.shape[0]].view(n, w.shape[0])
        torch.mm(x, w.t(), out=logits) if bias is None else torch.addmm(bias[here].to(x.dtype), x, w.t(), out=logits)
        if logit_scale != 1.0:
            logits *= logit_scale
        _dlogits(
            logits, of_rows[0], target, class_weight, of_rows[1], of_rows[2], first, n_classes, ignore_index,
            label_smoothing, z_loss, softcap,
        )  # fmt: skip
        if logit_scale != 1.0:
            logits *= logit_scale
        if need_dhidden and x.dtype == torch.bfloat16 and accumulate_product is not None:
            accumulate_product(dx, logits, w)
        elif need_dhidden:
            dx.addmm_(logits.to(wide), w.to(wide))
        if need_dweight:
            dweight[here] = _times(torch.mm(logits.t(), x), factor)
        if need_dbias:
            dbias[here] = _times(logits.sum(0, dtype=wide), factor)
    if need_dhidden:
        dhidden.view(-1, hidden.shape[-1])[kept] = _times(dx, factor).to(hidden.dtype)
    return dhidden, dweight, dbias


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor
