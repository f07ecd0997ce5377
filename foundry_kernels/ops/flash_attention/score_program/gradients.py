"""The gradients of captured tensors, which operators return as one vector `dscore`: those of some slots, one after the
other, each as if its tensor were contiguous, in float32 (float64 where q is float64)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from foundry_kernels.core.registry import wide_dtype


def empty_dscore(q: Tensor, tensors: Sequence[Tensor], slots: Sequence[int]) -> Tensor | None:
    """Memory for the gradients of these slots; None where there are none."""
    if len(slots) == 0:
        return None
    return q.new_empty(sum([tensors[slot].numel() for slot in slots]), dtype=wide_dtype(q.dtype))


def split_dscore(dscore: Tensor, tensors: Sequence[Tensor], slots: Sequence[int]) -> list[Tensor | None]:
    """The gradient of each captured tensor, of its shape and dtype; None for those that are not among the slots."""
    found: list[Tensor | None] = [None] * len(tensors)
    begin = 0
    for slot in slots:
        x = tensors[slot]
        end = begin + x.numel()
        found[slot] = dscore[begin:end].view(x.shape).to(x.dtype)
        begin = end
    return found
