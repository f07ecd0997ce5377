"""The order in which the matrices lie in memory, and so their gradient."""

from __future__ import annotations

from torch import Tensor


def transposed(weight: Tensor) -> bool:
    """Whether ``[E, K, N]`` matrices lie in memory as ``[E, N, K]``."""
    return weight.stride(2) != 1 and weight.stride(1) == 1


def empty_dweight(weight: Tensor) -> Tensor:
    """Returns memory for weight's gradient, in the order of weight's own."""
    if transposed(weight):
        return weight.new_empty(weight.shape[0], weight.shape[2], weight.shape[1]).transpose(1, 2)
    return weight.new_empty(weight.shape)
