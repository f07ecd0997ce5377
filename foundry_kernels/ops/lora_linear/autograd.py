"""The autograd function that all backends share. A backend gives three thin matmuls, whose other side is wide:

- ``down(x, a, dropout)``: ``drop(x) a^T``, float32 ``[N, r]`` from ``[N, K]`` and ``[r, K]``;
- ``up(out, t, b, scale, dropout, in_place)``: ``out + drop(scale t b^T)``, ``[N, M]`` from ``[N, r]`` and ``[M, r]``;
- ``outer(t, x, dropout)``: ``t^T drop(x)``, float32 ``[r, K]``, summed over the rows.

The matmuls with the weights are PyTorch's. x and ``x A^T`` are all that is saved beside the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.autograd import apply
from foundry_kernels.core.dropout import NO_DROPOUT, DropoutOptions
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear import Linear, chosen


class Products(NamedTuple):
    down: Callable[[Tensor, Tensor, DropoutOptions], Tensor]
    up: Callable[[Tensor, Tensor, Tensor, float, DropoutOptions, bool], Tensor]
    outer: Callable[[Tensor, Tensor, DropoutOptions], Tensor]


class _Call(NamedTuple):
    """What is no tensor in a call: the kernels, F.linear or its replacement, the layers' scales, ranks and the
    probability of dropout."""

    products: Products
    linear: Linear
    scales: tuple[float, ...]
    ranks: tuple[int, ...]
    dropout_p: float


def _stacked(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return tensors[0].to(dtype) if len(tensors) == 1 else torch.cat([t.to(dtype) for t in tensors])


def _parts(tensors: tuple[Any, ...], n: int) -> list[tuple[Any, ...]]:
    """The tensors of an argument, one of each of n layers: weights, A's, B's, biases, bases."""
    return [tensors[i : i + n] for i in range(0, len(tensors), n)]


def _forward(call: _Call, x: Tensor, seed: Tensor | None, *tensors: Any) -> tuple[Tensor, list[Tensor]]:
    weights, a, b, biases, bases = _parts(tensors, len(call.scales))
    rows, compute = x.reshape(-1, x.shape[-1]), wide_dtype(x.dtype)
    dropout = NO_DROPOUT if seed is None else DropoutOptions(call.dropout_p, seed)
    t = call.products.down(rows, _stacked(a, compute), dropout)
    found = []
    for i, part in enumerate(t.split(call.ranks, -1)):
        own = bases[i] is None
        out = call.linear(x, weights[i], biases[i]) if own else bases[i]
        flat = out.reshape(-1, out.shape[-1])
        y = call.products.up(flat, part, b[i].to(compute), call.scales[i], NO_DROPOUT, own)
        found.append(y.view(out.shape))
    return t, found


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, x: Tensor, seed: Tensor | None, *tensors: Any) -> Any:
        t, found = _forward(call, x, seed, *tensors)
        weights, a, b, *_ = _parts(tensors, len(call.scales))
        needed = any(w is not None and w.requires_grad for w in weights) or any(each.requires_grad for each in a)
        ctx.call, ctx.shape = call, x.shape
        ctx.save_for_backward(x if needed else None, t, seed, *weights, *a, *b)
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        refuse_second_derivative("lora_linear")
        call, n = ctx.call, len(grads)
        x, t, seed, *tensors = ctx.saved_tensors
        weights, a, b = _parts(tuple(tensors), n)
        _, need_x, _, *needs = ctx.needs_input_grad
        need_weights, need_a, need_b, need_biases, need_bases = _parts(tuple(needs), n)
        dropout = NO_DROPOUT if seed is None else DropoutOptions(call.dropout_p, seed)
        compute = t.dtype
        rows = None if x is None else x.reshape(-1, x.shape[-1])
        dys = [dy.reshape(-1, dy.shape[-1]) for dy in grads]
        parts = t.split(call.ranks, -1)
        gradients: list[list[Tensor | None]] = [[None] * n for _ in range(5)]
        dt = None
        if need_x or any(need_a):
            down = [call.products.down(dy, each.to(compute).t(), NO_DROPOUT) for dy, each in zip(dys, b, strict=True)]
            dt = torch.cat([d * s for d, s in zip(down, call.scales, strict=True)], -1)
        if dt is not None and any(need_a):
            da = call.products.outer(dt, rows, dropout).split(call.ranks)
            gradients[1] = [d.to(p.dtype) if need else None for d, p, need in zip(da, a, need_a, strict=True)]
        dx = None
        for i, dy in enumerate(dys):
            if need_b[i]:
                db = call.products.outer(parts[i], dy, NO_DROPOUT).t()
                gradients[2][i] = (db * call.scales[i]).to(b[i].dtype)
            if need_weights[i]:
                gradients[0][i] = dy.t() @ rows
            if need_biases[i]:
                gradients[3][i] = dy.sum(0)
            if need_bases[i]:
                gradients[4][i] = grads[i]
            if need_x and weights[i] is not None:
                own = call.linear(dy, weights[i].t())
                dx = own if dx is None else dx.add_(own)
        if need_x:
            assert dt is not None
            into = dys[0].new_zeros((dt.shape[0], a[0].shape[1])) if dx is None else dx
            dx = call.products.up(into, dt, _stacked(a, compute).t(), 1.0, dropout, True).view(ctx.shape)
        return None, dx, None, *(g for kind in gradients for g in kind)


def lora_linear(
    products: Products,
    x: Tensor,
    weights: Sequence[Tensor | None],
    lora_as: Sequence[Tensor],
    lora_bs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    bases: Sequence[Tensor | None],
    scales: Sequence[float],
    dropout_p: float = 0.0,
    dropout_seed: Tensor | None = None,
) -> Sequence[Tensor]:
    """The operation by a backend's matmuls, with its gradients."""
    call = _Call(products, chosen(), tuple(scales), tuple([a.shape[0] for a in lora_as]), dropout_p)
    tensors = (*weights, *lora_as, *lora_bs, *biases, *bases)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tensors)):
        found: Sequence[Tensor] = apply(_LoraLinear, call, x, dropout_seed, *tensors)
        return found
    return _forward(call, x, dropout_seed, *tensors)[1]
