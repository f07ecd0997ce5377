"""The autograd function around the two operators of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.log_probs.options import LogProbsOptions

FWD = (
    f"log_probs_fwd(Tensor logits, Tensor target, {LogProbsOptions.SCHEMA}, bool save_entropy, bool save_lse, "
    "bool save_low) -> (Tensor log_probs, Tensor entropy, Tensor lse, Tensor lse_low)"
)
BWD = (
    "log_probs_bwd(Tensor dlog_probs, Tensor? dlse, Tensor? dentropy, Tensor logits, Tensor target, Tensor lse, "
    f"Tensor lse_low, {LogProbsOptions.SCHEMA}) -> Tensor dlogits"
)

#: The forward and the backward operator by the prefix of their names, which torch.compile can look up.
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def row_gradients(
    dlog_probs: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None, entropy: Tensor, like: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The numbers g, c and b of each token, by which its logits' gradient is ``[j = t] g + p_j (c - g + b (y_j -
    lse))`` (c and b: None for 0), from the gradients of the results, which are None for those that are not used."""
    g = torch.zeros_like(like) if dlog_probs is None else dlog_probs
    if dentropy is None:
        return g, dlse, None
    c = -dentropy * entropy
    return g, c if dlse is None else c + dlse, -dentropy


def make_backend(
    prefix: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor | None, Tensor | None]]:
    """The backend's function, from its operators, whose schemas are `FWD` and `BWD`."""
    _OPERATORS[prefix] = forward, backward

    def log_probs(
        logits: Tensor, target: Tensor, options: LogProbsOptions
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if torch.is_grad_enabled() and logits.requires_grad:
            picked, entropy, lse = apply(_LogProbs, prefix, logits, target, options)
        else:
            wanted = (options.return_entropy, options.return_lse, False)
            picked, entropy, lse, _ = forward(logits, target, *options.operator_args(), *wanted)
        return picked, entropy if options.return_entropy else None, lse if options.return_lse else None

    return log_probs


class _LogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prefix: str, logits: Tensor, target: Tensor, options: LogProbsOptions) -> tuple[Tensor, ...]:
        ctx.prefix, ctx.options = prefix, options.operator_args()
        picked, entropy, lse, low = _OPERATORS[prefix][0](
            logits, target, *ctx.options, options.return_entropy, True, True
        )
        ctx.set_materialize_grads(False)
        ctx.returns = options.return_entropy, options.return_lse
        ctx.save_for_backward(logits, target, entropy, lse, low)
        return picked, entropy, lse

    @staticmethod
    def backward(ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None) -> Any:
        refuse_second_derivative("log_probs")
        logits, target, entropy, lse, low = ctx.saved_tensors
        # torch.compile materializes the gradients of results that nobody gets.
        dentropy, dlse = (d if returned else None for d, returned in zip((dentropy, dlse), ctx.returns, strict=True))
        g, c, b = row_gradients(dlog_probs, dentropy, dlse, entropy, lse)
        return None, _OPERATORS[ctx.prefix][1](g, c, b, logits, target, lse, low, *ctx.options), None, None
