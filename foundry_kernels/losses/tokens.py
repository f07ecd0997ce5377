"""The log-probabilities of sequences of tokens, and sums over the tokens that count."""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_not_negative, check_shape, check_tensor
from foundry_kernels.ops.linear_log_probs import linear_log_probs


class HeadOptions(TypedDict, total=False):
    """Options of the head, as for `linear_log_probs`."""

    bias: Tensor | None
    logit_scale: float
    softcap: float | None
    ignore_index: int
    chunk_size: int | None
    batch_invariant: bool
    backend: str


def token_logps(hidden: Tensor, weight: Tensor, target: Tensor, **head: Unpack[HeadOptions]) -> tuple[Tensor, Tensor]:
    """The log-probabilities ``[B, T]`` of the targets, 0 where a token does not count, and which do, as bools."""
    check_tensor("hidden", hidden)
    check_tensor("target", target)
    if hidden.dim() != 3:
        raise ValueError(
            f"hidden must be [B, T, D], a sequence of tokens for each row; got shape {tuple(hidden.shape)}"
        )
    found = linear_log_probs(hidden, weight, target, **head)
    assert isinstance(found, Tensor)
    return found, target != head.get("ignore_index", -100)


def sequence_logps(
    hidden: Tensor, weight: Tensor, target: Tensor, average: bool = False, **head: Unpack[HeadOptions]
) -> Tensor:
    """The sum ``[B]`` of each sequence's log-probabilities, or their mean over the tokens that count; 0 if none do."""
    each, counts = token_logps(hidden, weight, target, **head)
    return each.sum(-1) / counts.sum(-1).clamp(min=1) if average else each.sum(-1)


def mean(each: Tensor) -> Tensor:
    """The mean over sequences or pairs; 0 if there are none."""
    return each.sum() / max(each.shape[0], 1)


def check_items(count: Any) -> None:
    """Checks `num_items_in_batch`, except the value of a tensor, for which the device would have to be waited for."""
    if not isinstance(count, Tensor):
        check_not_negative("num_items_in_batch", count)
    elif count.numel() != 1:
        raise ValueError(f"num_items_in_batch must be one number; got shape {tuple(count.shape)}")


def over_items(total: Tensor, count: Tensor | float) -> Tensor:
    """total / count, where 0 / 0 is 0, with a gradient of 0. Any other sum over 0 items is infinite: the count is wrong
    then."""
    # It is the divisor that is chosen: the gradient of a quotient that is chosen afterwards is 0 / 0 all the same.
    if isinstance(count, Tensor):
        count = count.to(total.device, total.dtype)
        return total / torch.where((count == 0) & (total == 0), 1, count)
    return total / (count if count else torch.where(total == 0, 1.0, 0.0))


def halves(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen sequences, the first half of a batch, and the rejected ones."""
    n = x.shape[0]
    if n % 2:
        raise ValueError(f"{name} must hold as many rejected sequences as chosen ones before them; got {n} in all")
    return x[: n // 2], x[n // 2 :]


def check_rows(name: str, x: Any, like: Tensor) -> None:
    """Checks the log-probabilities or weights that a caller brings, one for each token or sequence."""
    check_tensor(name, x)
    check_shape(name, x, tuple(like.shape), "a value for each log-probability")
