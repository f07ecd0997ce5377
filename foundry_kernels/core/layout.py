"""The order in which a tensor's dimensions lie in memory."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def storage_order(x: Tensor) -> list[int]:
    """The dimensions of `x` from the outermost to the innermost in memory. The last one always counts as innermost.

    ``x.permute(order)`` is what a dense tensor of that order looks like when it is contiguous: [0, 2, 1, 3] for a
    ``[B, H, T, D]`` view of ``[B, T, H, D]`` memory. Dimensions of size 1 or stride 0, which no memory order
    distinguishes, stay where they are in the shape.
    """
    return list(range(x.dim())) if x.is_contiguous() else order_of(x.shape, x.stride())


def order_of(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """`storage_order` of a tensor that has elements, from numbers."""
    order = list(range(len(shape)))
    slots = [d for d in range(len(shape) - 1) if shape[d] > 1 and strides[d] > 0]
    ranked: list[int] = []
    for d in slots:  # by insertion: a sort by key cannot be traced where strides are symbolic
        at = len(ranked)
        while at > 0 and strides[ranked[at - 1]] < strides[d]:
            at -= 1
        ranked.insert(at, d)
    for slot, d in zip(slots, ranked, strict=True):
        order[slot] = d
    return order


def inverse(order: list[int]) -> list[int]:
    """The permutation that undoes `order`."""
    undo = [0] * len(order)
    for i, d in enumerate(order):
        undo[d] = i
    return undo


def dense_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor of this shape, its dimensions lying in this order, as torch.empty gives them."""
    strides, step = [0] * len(shape), 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
    return tuple(strides)


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Tensor.is_contiguous, from numbers; no size is 0."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1:
            if stride != step:
                return False
            step *= size
    return True
