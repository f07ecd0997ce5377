"""Per-token log-probabilities, from a caller or from hidden states, and sums over the tokens that count."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, NamedTuple, TypedDict

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


class Tokens(NamedTuple):
    """``[B, T]`` each: log-probabilities, 0 where a token does not count, which tokens count, and entropies if they
    were asked for."""

    log_probs: Tensor
    counts: Tensor
    entropies: Tensor | None

    @property
    def lengths(self) -> Tensor:
        """``[B]``: how many tokens count, at least 1."""
        return self.counts.sum(-1).clamp(min=1)

    def mean(self, x: Tensor) -> Tensor:
        """The mean over the tokens that count; of ``[B, 1]``, a value for each sequence, the mean of these."""
        if x.shape[-1] == 1 != self.counts.shape[-1]:
            return x.sum() / max(x.shape[0], 1)
        return torch.where(self.counts, x, 0.0).sum() / self.counts.sum().clamp(min=1)

    def entropy(self) -> Tensor | None:
        return None if self.entropies is None else self.mean(self.entropies.detach())


class Hidden:
    """Hidden states, head and targets in the place of log-probabilities, which are computed when a loss has checked its
    arguments."""

    def __init__(self, hidden: Tensor, weight: Tensor, target: Tensor, head: HeadOptions, entropies: bool) -> None:
        check_tensor("hidden", hidden)
        check_tensor("target", target)
        if hidden.dim() != 3:
            raise ValueError(
                f"hidden must be [B, T, D], a sequence of tokens for each row; got shape {tuple(hidden.shape)}"
            )
        self.shape = target.shape
        self._given, self._head, self._entropies = (hidden, weight, target), head, entropies

    def tokens(self) -> Tokens:
        found = linear_log_probs(*self._given, return_entropy=self._entropies, **self._head)
        log_probs, entropies = found if isinstance(found, tuple) else (found, None)
        return Tokens(log_probs, self._given[2] != self._head.get("ignore_index", -100), entropies)


def shape_of(log_probs: Any, mask: Any) -> tuple[int, ...]:
    """The shape ``[B, T]`` of the tokens of a call, which is checked."""
    if not isinstance(log_probs, Hidden):
        check_tensor("log_probs", log_probs)
        check_tensor("mask", mask)
        if log_probs.dim() != 2 or not log_probs.is_floating_point():
            raise ValueError(
                f"log_probs must be floating point [B, T]; got {log_probs.dtype} of shape {tuple(log_probs.shape)}"
            )
        check_shape("mask", mask, tuple(log_probs.shape), "like log_probs")
    return tuple(log_probs.shape)


def tokens_of(log_probs: Any, mask: Any, entropies: Tensor | None) -> Tokens:
    if isinstance(log_probs, Hidden):
        return log_probs.tokens()
    if entropies is not None:
        check_rows("entropies", entropies, tuple(log_probs.shape))
    counts = mask.bool()
    return Tokens(torch.where(counts, log_probs, 0.0), counts, entropies)


def from_hidden(form: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes of a loss of log-probabilities that of hidden states, with the same other arguments and options of the
    head; the decorated function brings name and documentation."""
    own = [p for p in signature(form).parameters.values() if p.name not in ("log_probs", "mask", "entropies")]
    leading = [Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in ("hidden", "weight", "target")]
    head = [signature(linear_log_probs).parameters[n] for n in HeadOptions.__annotations__]
    merged = signature(form).replace(parameters=sorted([*leading, *own, *head], key=lambda p: p.kind))
    reads_entropies = "entropies" in signature(form).parameters

    def decorate(stub: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(stub)
        def loss(hidden: Tensor, weight: Tensor, target: Tensor, *args: Any, **options: Any) -> Any:
            given: Any = {name: options.pop(name) for name in HeadOptions.__annotations__ if name in options}
            entropies = reads_entropies and (
                options.get("return_metrics", False)
                or options.get("entropy_coef", 0.0) != 0.0
                or options.get("top_entropy_quantile", 1.0) < 1.0
            )
            mask = options.pop("mask", None)  # of fewer tokens than have a target
            return form(Hidden(hidden, weight, target, given, entropies), mask, *args, **options)

        loss.__signature__ = merged  # type: ignore[attr-defined]
        return loss

    return decorate


def mean(each: Tensor) -> Tensor:
    """The mean over sequences or pairs; 0 if there are none."""
    return each.sum() / max(each.shape[0], 1)


def mean_of(which: Tensor, each: Tensor) -> Tensor:
    """The mean over those that are chosen; 0 if none are."""
    return torch.where(which, each, 0.0).sum() / which.sum().clamp(min=1)


def check_items(count: Any) -> None:
    """Checks `num_items_in_batch`, except the value of a tensor, for which the device would have to be waited for."""
    if not isinstance(count, Tensor):
        check_not_negative("num_items_in_batch", count)
    elif count.numel() != 1:
        raise ValueError(f"num_items_in_batch must be one number; got shape {tuple(count.shape)}")


def check_smoothing(label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in 0 .. 0.5; got {label_smoothing}")


def check_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def over_items(total: Tensor, count: Tensor | float) -> Tensor:
    """total / count, where 0 / 0 is 0, with a gradient of 0. Any other sum over 0 items is infinite: the count is wrong
    then."""
    # It is the divisor that is chosen: the gradient of a quotient that is chosen afterwards is 0 / 0 all the same.
    if isinstance(count, Tensor):
        count = count.to(total.device, total.dtype)
        return total / torch.where((count == 0) & (total == 0), 1, count)
    return total / (count if count else torch.where(total == 0, 1.0, 0.0))


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen sequences, the first half of a batch, and the rejected ones."""
    return x[: x.shape[0] // 2], x[x.shape[0] // 2 :]


def shape_of_pairs(log_probs: Any, mask: Any) -> tuple[int, ...]:
    """:func:`shape_of` ``[2 B, T]``."""
    shape = shape_of(log_probs, mask)
    if (n := shape[0]) % 2:
        name = "hidden" if isinstance(log_probs, Hidden) else "log_probs"
        raise ValueError(f"{name} must hold as many rejected sequences as chosen ones before them; got {n} in all")
    return shape


def check_rows(name: str, x: Any, shape: tuple[int, ...]) -> None:
    """Checks the log-probabilities or weights that a caller brings, one for each token or sequence."""
    check_tensor(name, x)
    check_shape(name, x, shape, "a value for each log-probability")
