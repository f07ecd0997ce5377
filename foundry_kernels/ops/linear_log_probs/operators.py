"""The two operators of a backend, forward and backward, and the autograd function around them.

They are the strategies of linear_cross_entropy, chunks of tokens and blocks of classes, with other kernels between the
matmuls: those of log_probs. The backward pass computes the logits once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.linear_cross_entropy import chunks, vocabulary_blocks
from foundry_kernels.ops.linear_cross_entropy.calls import Inputs, Kernels, Needs, Saves
from foundry_kernels.ops.linear_cross_entropy.operators import LSE_BACKWARD
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions
from foundry_kernels.ops.linear_log_probs.options import LinearLogProbsOptions
from foundry_kernels.ops.log_probs.operators import row_gradients

_INPUTS = "Tensor hidden, Tensor weight, Tensor target, Tensor? bias"
FWD = (
    f"linear_log_probs_fwd({_INPUTS}, {LinearLogProbsOptions.SCHEMA}, bool save_entropy, bool save_lse, bool save_low) "
    "-> (Tensor log_probs, Tensor entropy, Tensor lse, Tensor lse_low)"
)
BWD = (
    f"linear_log_probs_bwd(Tensor drows, {_INPUTS}, Tensor lse, Tensor lse_low, {LinearLogProbsOptions.SCHEMA}, "
    "bool need_dhidden, bool need_dweight, bool need_dbias) -> (Tensor dhidden, Tensor dweight, Tensor dbias)"
)
_NOTHING = Needs(False, False, False)


def _inputs(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> Inputs:
    return Inputs(hidden, weight, target, bias, class_weight=None)


class Strategy(NamedTuple):
    """What a backend's operators do.

    kernels: as for linear_cross_entropy, with a log-probability for a loss and an entropy for a z-loss. A token's
    incoming gradient is a row of the numbers g, c and b of `log_probs.operators.row_gradients`, of which c and b may be
    left out. chunk_size: as for linear_cross_entropy.
    """

    kernels: Kernels
    chunk_size: Callable[[Tensor, Tensor, LinearLossOptions, Needs], int | None]

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, (options, flags) = _inputs(*args[:4]), LinearLogProbsOptions.from_operator_args(args[4:])
        save_entropy, save_lse, save_low = flags
        loss = options.of_loss()
        saves = Saves(save_lse, save_entropy, save_low, False)
        with no_autocast(inputs.hidden):
            if loss.tiles and self.kernels.losses is not None:
                found = vocabulary_blocks.forward(self.kernels, inputs, loss, saves)
            else:
                found = chunks.forward(self.kernels, inputs, loss, saves, _NOTHING)
        return found.loss, found.z_loss, found.lse, found.lse_low

    def backward(self, drows: Tensor, *args: Any) -> tuple[Tensor, ...]:
        inputs, lse, lse_low = _inputs(*args[:4]), args[4], args[5]
        options, needs = LinearLogProbsOptions.from_operator_args(args[6:])
        loss = options.of_loss()
        of = vocabulary_blocks if loss.tiles else chunks
        with no_autocast(inputs.hidden):
            return of.backward(self.kernels, drows, inputs, lse, lse_low, loss, Needs(*needs))


def _fake_forward(hidden: Tensor, weight: Tensor, target: Tensor, *args: Any) -> tuple[Tensor, ...]:
    dtype = wide_dtype(hidden.dtype)
    wanted = (True, *args[-3:])
    return tuple(hidden.new_empty(target.shape if w else (0,), dtype=dtype) for w in wanted)


def _fake_backward(drows: Tensor, hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(s if needed else (0,)) for s, needed in zip(shapes, rest[-3:], strict=True))


#: The forward and the backward operator by the prefix of their names, which torch.compile can look up.
_OPERATORS: dict[str, tuple[Any, Any]] = {}


def make_backend(prefix: str, define: Callable[..., Any], strategy: Strategy) -> Callable[..., tuple[Any, ...]]:
    """The backend's function. Its operators, with `prefix` before their names, are registered by ``define(schema,
    function, fake)``."""
    _OPERATORS[prefix] = (
        define(prefix + FWD, strategy.forward, _fake_forward),
        define(prefix + BWD, strategy.backward, _fake_backward),
    )
    LSE_BACKWARD[prefix] = _OPERATORS[prefix][1]
    forward, chunk_size = _OPERATORS[prefix][0], strategy.chunk_size

    def linear_log_probs(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, options: LinearLogProbsOptions
    ) -> tuple[Any, ...]:
        needs = _NOTHING
        if torch.is_grad_enabled():
            needs = Needs(hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
        options = options._replace(chunk_size=chunk_size(hidden, weight, options.of_loss(), needs))
        if any(needs):
            found = apply(_LinearLogProbs, prefix, hidden, weight, target, bias, options)
        else:
            saves = (options.return_entropy, options.return_lse, False)
            found = forward(hidden, weight, target, bias, *options.operator_args(), *saves)
        return found[0], found[1] if options.return_entropy else None, found[2] if options.return_lse else None

    return linear_log_probs


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prefix: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        options: LinearLogProbsOptions,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        _, need_dhidden, need_dweight, _, need_dbias, _ = ctx.needs_input_grad
        ctx.prefix, ctx.options, ctx.needs = prefix, options.operator_args(), (need_dhidden, need_dweight, need_dbias)
        picked, entropy, lse, low = _OPERATORS[prefix][0](
            hidden, weight, target, bias, *ctx.options, options.return_entropy, True, True
        )
        ctx.set_materialize_grads(False)
        ctx.returns = options.return_entropy, options.return_lse
        ctx.save_for_backward(hidden, weight, target, bias, entropy, lse, low)
        return picked, entropy, lse

    @staticmethod
    def backward(ctx: Any, dlog_probs: Tensor | None, dentropy: Tensor | None, dlse: Tensor | None) -> Any:
        refuse_second_derivative("linear_log_probs")
        hidden, weight, target, bias, entropy, lse, low = ctx.saved_tensors
        # torch.compile materializes the gradients of results that nobody gets.
        dentropy, dlse = (d if returned else None for d, returned in zip((dentropy, dlse), ctx.returns, strict=True))
        g, c, b = row_gradients(dlog_probs, dentropy, dlse, entropy, lse)
        drows = torch.stack([x for x in (g, c, b) if x is not None], -1)
        found = _OPERATORS[ctx.prefix][1](drows, hidden, weight, target, bias, lse, low, *ctx.options, *ctx.needs)
        dhidden, dweight, dbias = (x if n else None for x, n in zip(found, ctx.needs, strict=True))
        return None, dhidden, dweight, None, dbias, None
