"""The autograd function that all backends share. A backend gives the thin matmuls, whose other side is wide, as
operators with these arguments, each with dropout of what it reads or adds:

- ``down(x, a, scale, ...)``: ``scale drop(x) a^T``, ``[N, r]`` from ``[N, K]`` and ``[r, K]``;
- ``up(base, t, b, scale, ...)``: ``base + drop(scale t b^T)``, ``[N, M]`` from ``[N, r]`` and ``[M, r]``; ``up_``,
  if there is one, overwrites base;
- ``outer(t, x, scale, transposed, ...)``: ``scale t^T drop(x)`` ``[r, K]``, or its transpose, summed over the rows.

t and the result of ``outer`` are float32 (float64 for float64). The matmuls with the weights are PyTorch's. x and
``x A^T`` are all that is saved beside the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.registry import is_subclass
from foundry_kernels.ops._linear import Linear, chosen


class Products(NamedTuple):
    down: Callable[..., Tensor]
    up: Callable[..., Tensor]
    outer: Callable[..., Tensor]
    up_: Callable[..., None] | None = None

    def add(self, base: Tensor, *args: Any) -> Tensor:
        """`up` of a `base` that nobody else has: in its place, except in a graph and in a DTensor."""
        if self.up_ is None or torch.compiler.is_compiling() or is_subclass(base):
            return self.up(base, *args)
        self.up_(base, *args)
        return base


class _Call(NamedTuple):
    """What is no tensor in a call: the kernels, F.linear or its replacement, the layers' scales, ranks and the
    probability of dropout."""

    products: Products
    linear: Linear
    scales: tuple[float, ...]
    ranks: tuple[int, ...]
    dropout_p: float


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))


def _parts(tensors: tuple[Any, ...], n: int) -> list[tuple[Any, ...]]:
    """The tensors of an argument, one of each of n layers: weights, A's, B's, biases, bases."""
    return [tensors[i : i + n] for i in range(0, len(tensors), n)]


def _rows(x: Tensor) -> Tensor:
    """x as a matrix. Views that change nothing are a tenth of the time of a call with one token."""
    dims = x.dim()
    return x if dims == 2 else x.flatten(0, -2) if dims > 2 else x.unsqueeze(0)


def _shaped(y: Tensor, shape: torch.Size) -> Tensor:
    """The matrix y in the shape of what it is the rows of."""
    return y if len(shape) == 2 else y.view(shape)


def _split(t: Tensor, ranks: tuple[int, ...], dim: int = -1) -> tuple[Tensor, ...]:
    return (t,) if len(ranks) == 1 else t.split(ranks, dim)


def _forward(call: _Call, x: Tensor, seed: Tensor | None, *tensors: Any) -> tuple[Tensor, list[Tensor]]:
    weights, a, b, biases, bases = _parts(tensors, len(call.scales))
    dropout = (call.dropout_p, seed)
    t = call.products.down(_rows(x), _stacked(a), 1.0, *dropout)
    found = []
    for i, part in enumerate(_split(t, call.ranks)):
        if (base := bases[i]) is None:
            base = call.linear(x, weights[i], biases[i])
            y = call.products.add(_rows(base), part, b[i], call.scales[i], 0.0, None)
        else:
            y = call.products.up(_rows(base), part, b[i], call.scales[i], 0.0, None)
        found.append(_shaped(y, base.shape))
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
        products, dropout = call.products, (call.dropout_p, seed)
        dys, parts = [_rows(dy) for dy in grads], _split(t, call.ranks)
        found: list[list[Tensor | None]] = [[None] * n for _ in range(5)]
        dt = None
        if need_x or any(need_a):
            downs = [products.down(dy, each.t(), s, 0.0, None) for dy, each, s in zip(dys, b, call.scales, strict=True)]
            dt = downs[0] if n == 1 else torch.cat(downs, -1)
        if dt is not None and any(need_a):
            da = _split(products.outer(dt, _rows(x), 1.0, False, *dropout), call.ranks, 0)
            found[1] = [d.to(p.dtype) if need else None for d, p, need in zip(da, a, need_a, strict=True)]
        dx = None
        for i, dy in enumerate(dys):
            if need_weights[i]:
                found[0][i] = call.linear(dy.t(), _rows(x).t())
            if need_b[i]:
                found[2][i] = products.outer(parts[i], dy, call.scales[i], True, 0.0, None).to(b[i].dtype)
            if need_biases[i]:
                found[3][i] = dy.sum(0)
            if need_bases[i]:
                found[4][i] = grads[i]
            if need_x and weights[i] is not None:
                own = call.linear(dy, weights[i].t())
                dx = own if dx is None else dx.add_(own)
        if need_x:
            dx = dys[0].new_zeros((dys[0].shape[0], a[0].shape[1])) if dx is None else dx
            dx = _shaped(products.add(dx, dt, _stacked(a).t(), 1.0, *dropout), ctx.shape)
        return None, dx, None, *(g for kind in found for g in kind)


def lora_linear(
    products: Products,
    x: Tensor,
    weights: Sequence[Tensor | None],
    lora_as: Sequence[Tensor],
    lora_bs: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    bases: Sequence[Tensor | None],
    scales: Sequence[float],
    dropout_p: float,
    dropout_seed: Tensor | None,
) -> Sequence[Tensor]:
    """The operation by a backend's matmuls, with its gradients."""
    call = _Call(products, chosen(), tuple(scales), tuple([a.shape[0] for a in lora_as]), dropout_p)
    tensors = (*weights, *lora_as, *lora_bs, *biases, *bases)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *tensors)):
        found: Sequence[Tensor] = apply(_LoraLinear, call, x, dropout_seed, *tensors)
        return found
    return _forward(call, x, dropout_seed, *tensors)[1]
