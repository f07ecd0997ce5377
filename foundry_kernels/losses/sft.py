"""Supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foundry_kernels.losses.tokens import check_items, over_items
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy


def sft_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, *, num_items_in_batch: Tensor | int | None = None, **options: Any
) -> Tensor:
    r"""The negative log-likelihood of the targets, over the tokens that count.

    .. math:: -\frac{1}{N} \sum_t \log p(y_t)

    Args:
        hidden: ``[..., D]``. weight: ``[V, D]``. target: ``[...]``. Packed documents need no more: the first token of
            each has the target `ignore_index` in the row before it.
        num_items_in_batch: N, the tokens of all micro-batches and devices of a step; None counts those of this call. A
            number or a tensor of one.
        options: those of :func:`foundry_kernels.linear_cross_entropy` except `reduction`.

    Returns:
        A float32 scalar. 0, with gradients of 0, if no token counts, also with an N of 0. If N is 0 though a token
        counts, infinite.

    Raises:
        As :func:`foundry_kernels.linear_cross_entropy`; ValueError if `num_items_in_batch` is a negative number.
    """
    if num_items_in_batch is None:
        return linear_cross_entropy(hidden, weight, target, reduction="mean", **options)
    check_items(num_items_in_batch)
    total = linear_cross_entropy(hidden, weight, target, reduction="sum", **options)
    return over_items(total, num_items_in_batch).reshape(())
