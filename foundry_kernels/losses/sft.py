"""Supervised fine-tuning."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from foundry_kernels.core.checks import check_bool
from foundry_kernels.losses.tokens import (
    check_items,
    from_hidden,
    over_items,
    shape_of,
    tokens_of,
)
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy


class FineTuningMetrics(NamedTuple):
    loss: Tensor
    #: The mean over the tokens that count, without a gradient; None without entropies.
    entropy: Tensor | None


def sft(
    log_probs: Tensor,
    mask: Tensor,
    *,
    entropies: Tensor | None = None,
    num_items_in_batch: Tensor | int | None = None,
    return_metrics: bool = False,
) -> Any:
    r"""The negative log-likelihood over the tokens that count, :math:`-\frac{1}{N} \sum_t \log p(y_t)`.

    Args:
        log_probs: ``[B, T]``. mask: ``[B, T]``, nonzero where a token counts.
        entropies: ``[B, T]``, for metrics.
        num_items_in_batch: N, the tokens of all micro-batches and devices of a step; None counts those of this call. A
            number or a tensor of one.
        return_metrics: whether to return :class:`FineTuningMetrics`.

    Returns:
        A scalar, or the metrics with it. 0, with gradients of 0, if no token counts, also with an N of 0. If N is 0
        though a token counts, infinite.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    shape_of(log_probs, mask)
    if num_items_in_batch is not None:
        check_items(num_items_in_batch)
    tokens = tokens_of(log_probs, mask, entropies)
    total = -tokens.log_probs.sum()
    count = tokens.counts.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
    loss = over_items(total, count).reshape(())
    return FineTuningMetrics(loss, tokens.entropy()) if return_metrics else loss


_with_metrics = from_hidden(sft)(sft)


def sft_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    num_items_in_batch: Tensor | int | None = None,
    return_metrics: bool = False,
    **options: Any,
) -> Any:
    """:func:`sft` of hidden states ``[..., D]``, the head's `weight` ``[V, D]`` and the tokens `target` ``[...]``.
    Packed documents need no more: the first token of each has the target `ignore_index` in the row before it.

    Args:
        return_metrics: whether to return :class:`FineTuningMetrics`; then `hidden` is ``[B, T, D]``, and options are
            those of the head (:mod:`foundry_kernels.losses`).
        options: those of :func:`foundry_kernels.linear_cross_entropy` except `reduction`.

    Raises:
        As :func:`foundry_kernels.linear_cross_entropy`; ValueError if `num_items_in_batch` is a negative number.
    """
    check_bool("return_metrics", return_metrics)
    if return_metrics:
        given = {"num_items_in_batch": num_items_in_batch, **options}
        return _with_metrics(hidden, weight, target, return_metrics=True, **given)
    if num_items_in_batch is None:
        return linear_cross_entropy(hidden, weight, target, reduction="mean", **options)
    check_items(num_items_in_batch)
    total = linear_cross_entropy(hidden, weight, target, reduction="sum", **options)
    return over_items(total, num_items_in_batch).reshape(())
