"""The order in which a tensor's dimensions lie in memory."""

from __future__ import annotations

from torch import Tensor


def storage_order(x: Tensor) -> list[int]:
    """The dimensions of `x` from the outermost to the innermost in memory. The last one always counts as innermost.

    ``x.permute(order)`` is what a dense tensor of that order looks like when it is contiguous: [0, 2, 1, 3] for a
    ``[B, H, T, D]`` view of ``[B, T, H, D]`` memory. Dimensions of size 1 or stride 0, which no memory order
    distinguishes, stay where they are in the shape.
    """
    order = list(range(x.dim()))
    if x.is_contiguous():
        return order
    slots = [d for d in range(x.dim() - 1) if x.size(d) > 1 and x.stride(d) > 0]
    ranked: list[int] = []
    for d in slots:  # by insertion: a sort by key cannot be traced where strides are symbolic
        at = len(ranked)
        while at > 0 and x.stride(ranked[at - 1]) < x.stride(d):
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
