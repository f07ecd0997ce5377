"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal. It is PEFT's arithmetic
with float32 adapters: the result of the frozen layer is rounded, the rest is in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foundry_kernels.core.dropout import dropout
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear import chosen


def lora_linear(
    x: Tensor,
    weights: Sequence[Tensor | None],
    lora_as: Sequence[Tensor],
    lora_bs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    bases: Sequence[Tensor | None],
    scales: Sequence[float],
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> list[Tensor]:
    linear, compute = chosen(), wide_dtype(x.dtype)
    dropped = x.to(compute) if dropout_seed is None else dropout(x, dropout_p, dropout_seed)
    found = []
    for weight, a, b, bias, base, scale in zip(weights, lora_as, lora_bs, biases, bases, scales, strict=True):
        if base is None:
            assert weight is not None
            base = linear(x, weight, bias)
        low_rank = linear(linear(dropped, a.to(compute)), b.to(compute))
        found.append((base.to(compute) + scale * low_rank).to(x.dtype).contiguous())
    return found
