"""Log-probabilities of tokens by a model, from its last hidden states: of targets in training, and of what was drawn in
generation. Both take the same operation, so within `fk.batch_invariant` they have the same bits."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, overload

from torch import Tensor

from foundry_kernels.core.checks import check_bool, check_positive
from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.models.model import Model
from foundry_kernels.ops import log_probs as of_logits
from foundry_kernels.ops.linear_log_probs import linear_log_probs

#: An `ignore_index` for tokens that all count.
NO_TOKEN = -1


class LogProbs(NamedTuple):
    """What :meth:`Transformer.log_probs` asks of the model's forward pass. Pass it as ``return_log_probs=`` to call a
    model through a wrapper: ``ddp(tokens, targets, return_log_probs=LogProbs(temperature=0.7))``.

    Attributes:
        return_entropy, return_lse, temperature: as for :meth:`Transformer.log_probs`.
    """

    return_entropy: bool = False
    return_lse: bool = False
    temperature: float = 1.0

    def of(self, model: Model, y: Tensor, targets: Tensor, ignore_index: int) -> Any:
        """Returns them of `targets` ``[...]``, from the head's input ``[..., dim]``."""
        check_bool("return_entropy", self.return_entropy)
        check_bool("return_lse", self.return_lse)
        check_positive("temperature", self.temperature)
        options: dict[str, Any] = {
            "logit_scale": 1.0 / self.temperature,
            "ignore_index": ignore_index,
            "return_entropy": self.return_entropy,
            "return_lse": self.return_lse,
        }
        if (head := model._head()) is None:
            backend = model.backends["cross_entropy"]
            return of_logits.log_probs(model._logits(y), targets, backend=backend, **options)
        backend = model.backends["linear_cross_entropy"]
        found = linear_log_probs(y, head[0], targets, bias=head[1], backend=backend, **options)
        if isinstance(found, tuple):
            return tuple(map(_whole, found))
        return _whole(found)


def _whole(x: Any) -> Any:
    return x.full_tensor() if is_dtensor(x) else x


@overload
def log_probs(
    model: Model, tokens: Tensor, targets: Tensor, *, return_entropy: Literal[False] = False,
    return_lse: Literal[False] = False, temperature: float = 1.0, **inputs: Any,
) -> Tensor: ...  # fmt: skip
@overload
def log_probs(
    model: Model, tokens: Tensor, targets: Tensor, *, return_entropy: bool = False, return_lse: bool = False,
    temperature: float = 1.0, **inputs: Any,
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip
def log_probs(
    model: Model,
    tokens: Tensor,
    targets: Tensor,
    *,
    return_entropy: bool = False,
    return_lse: bool = False,
    temperature: float = 1.0,
    **inputs: Any,
) -> Tensor | tuple[Tensor, ...]:
    """Returns the log-probability of each target, without logits (:func:`foundry_kernels.linear_log_probs`).

    Args:
        tokens, targets: ``[B, T]``, as for the model's forward pass: ``targets[:, t]`` is the token that follows
            ``tokens[:, : t + 1]``, or `ignore_index`, whose value is 0.
        return_entropy: also return the entropy of the distribution of each target.
        return_lse: also return the log of its normalizer.
        temperature: the logits are divided by it.
        inputs: other arguments of the forward pass (`lengths`, `cu_seqlens`, `ignore_index`).

    Returns:
        ``[B, T]`` float32 (float64 for a float64 model); with a `return_` option a tuple ``(log_probs, [entropy],
        [lse])``. All are differentiable. With ``return_router_stats=True`` a pair of these and the statistics.

    Raises:
        TypeError, ValueError: as the forward pass; temperature is not positive.

    The model itself is called, so hooks of FSDP2 and tensor parallelism run. See :class:`LogProbs` for wrappers.
    """
    request = LogProbs(return_entropy, return_lse, temperature)
    found: Tensor | tuple[Tensor, ...] = model(tokens, targets, return_log_probs=request, **inputs)
    return found
