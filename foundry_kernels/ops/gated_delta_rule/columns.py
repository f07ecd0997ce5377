"""Calls of a backend's operators, also for values with more columns than a kernel takes.

A column of a state depends on its column of the values alone, so these heads run as two parts. Gradients of what both
parts share are sums over the parts. For training, the kernels get such 16-bit heads in float32, so that each result is
rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.layout import inverse, storage_order
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_delta_rule.checks import MAX_HEAD_DIM

_PARTS = slice(0, MAX_HEAD_DIM), slice(MAX_HEAD_DIM, None)
#: Places among the operators' tensors of those that have the values' columns.
_VALUES, _STATES = 2, 5


def forward(
    operator: Callable[..., Any], tensors: Sequence[Tensor | None], options: Sequence[Any], need_final: bool, save: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """`out`, `final_state`, and the `states` of each part. The arguments are those of the operator `FWD`."""
    v = tensors[2]
    assert v is not None
    if v.shape[-1] <= MAX_HEAD_DIM:
        out, final, states = operator(*tensors, *options, need_final, save)
        return out, final, (states,)
    given = _wide(tensors, v) if save else tensors
    found = [operator(*_part(given, at), *options, need_final, save) for at in _PARTS]
    outs, finals, states = zip(*found, strict=True)
    return _joined(outs, v), torch.cat(finals, -1) if need_final else finals[0], states


def backward(
    operator: Callable[..., Any],
    dout: Tensor,
    dfinal: Tensor | None,
    tensors: Sequence[Tensor | None],
    states: Sequence[Tensor],
    options: Sequence[Any],
    needs: Sequence[bool],
) -> Sequence[Tensor]:
    """The gradients of the operator `BWD`, from the states that `forward` has saved."""
    v = tensors[2]
    assert v is not None
    if v.shape[-1] <= MAX_HEAD_DIM:
        return operator(dout, dfinal, *tensors, *states, *options, *needs)
    given, dout = _wide(tensors, v), dout.to(wide_dtype(v.dtype))
    parts = [
        operator(dout[..., at], None if dfinal is None else dfinal[..., at], *_part(given, at), saved, *options, *needs)
        for at, saved in zip(_PARTS, states, strict=True)
    ]
    found = []
    for i, (x, both) in enumerate(zip(tensors, zip(*parts, strict=True), strict=True)):
        if x is None or not needs[i]:
            found.append(both[0])
        elif i == _VALUES:
            found.append(_joined(both, v))
        elif i == _STATES:
            found.append(torch.cat(both, -1))
        else:
            found.append((both[0] + both[1]).to(x.dtype))
    return found


def _wide(tensors: Sequence[Tensor | None], v: Tensor) -> list[Tensor | None]:
    return [None if x is None else x.to(wide_dtype(v.dtype)) for x in tensors]


def _part(tensors: Sequence[Tensor | None], at: slice) -> list[Tensor | None]:
    """The operators' tensors with some columns of the values and of the initial states."""
    return [x if x is None or i not in (_VALUES, _STATES) else x[..., at] for i, x in enumerate(tensors)]


def _joined(parts: Sequence[Tensor], v: Tensor) -> Tensor:
    """The parts' columns side by side, of v's dtype and in v's storage order."""
    order = storage_order(v)
    return torch.cat([part.permute(order) for part in parts], -1).permute(inverse(order)).to(v.dtype)
