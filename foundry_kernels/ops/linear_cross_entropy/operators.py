"""The two operators of a backend, forward and backward, and the autograd function around them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.linear_cross_entropy import chunks, vocabulary_blocks
from foundry_kernels.ops.linear_cross_entropy.calls import (
    Inputs,
    Kernels,
    Needs,
    Saves,
    empty_outputs,
    scaled,
    target_probabilities,
)
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions

_INPUTS = "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? class_weight"
_NEEDS = "bool need_dhidden, bool need_dweight, bool need_dbias"
FWD = (
    f"linear_cross_entropy_fwd({_INPUTS}, {LinearLossOptions.SCHEMA}, bool save_lse, bool save_z_loss, "
    f"bool save_stats, bool save_predicted, {_NEEDS}) -> (Tensor loss, Tensor lse, Tensor lse_low, Tensor z_loss, "
    "Tensor dscale, Tensor dhidden, Tensor dweight, Tensor dbias, Tensor predicted)"
)
BWD = (
    f"linear_cross_entropy_bwd(Tensor dloss, {_INPUTS}, Tensor lse, Tensor lse_low, {LinearLossOptions.SCHEMA}, "
    f"{_NEEDS}) -> (Tensor dhidden, Tensor dweight, Tensor dbias)"
)
_NOTHING = Needs(False, False, False)

#: By the prefix of its name the operator that computes the gradients of an lse: the backward operator of
#: linear_log_probs, which is built on this module and sets it.
LSE_BACKWARD: dict[str, Any] = {}

#: Rows of a gradient that are widened at a time: the copy stays in the cache.
_ROWS = 4096

#: Whether the backward pass that is running may be followed by another one through the same graph.
_graph_is_retained = torch._C._autograd._get_current_graph_task_keep_graph


class Strategy(NamedTuple):
    """What a backend's operators do.

    kernels: the cross-entropy of logits. chunk_size: that of a call, of hidden, weight, the options and what gets a
    gradient; None where it depends on the tokens that count. scale_: multiplies a gradient in place by a number that is
    on its device; None where that is PyTorch's.
    """

    kernels: Kernels
    chunk_size: Callable[[Tensor, Tensor, LinearLossOptions, Needs], int | None]
    scale_: Callable[[Tensor, Tensor], None] | None = None

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, (options, flags) = Inputs(*args[:5]), LinearLossOptions.from_operator_args(args[5:])
        saves, needs = Saves(*flags[:4]), Needs(*flags[4:])
        with no_autocast(inputs.hidden):
            if options.tiles and self.kernels.losses is not None:
                return tuple(vocabulary_blocks.forward(self.kernels, inputs, options, saves))
            return tuple(chunks.forward(self.kernels, inputs, options, saves, needs))

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, (options, flags) = Inputs(*args[:5]), LinearLossOptions.from_operator_args(args[5:])
        dtypes = chunks.gradient_dtypes(inputs.hidden, inputs.weight, options, self.kernels.cpu)
        return tuple(empty_outputs(inputs, options, Saves(*flags[:4]), Needs(*flags[4:]), dtypes))

    def backward(self, dloss: Tensor, *args: Any) -> tuple[Tensor, ...]:
        inputs, lse, lse_low = Inputs(*args[:5]), args[5], args[6]
        options, needs = LinearLossOptions.from_operator_args(args[7:])
        of = vocabulary_blocks if options.tiles else chunks
        with no_autocast(inputs.hidden):
            return of.backward(self.kernels, dloss, inputs, lse, lse_low, options, Needs(*needs))


def _fake_backward(dloss: Tensor, hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(s if needed else (0,)) for s, needed in zip(shapes, rest[-3:], strict=True))


#: The forward and the backward operator by the prefix of their names, which torch.compile can look up; and `scale_`.
_OPERATORS: dict[str, tuple[Any, Any]] = {}
_SCALE: dict[str, Any] = {}


def make_backend(prefix: str, define: Callable[..., Any], strategy: Strategy) -> Callable[..., tuple[Tensor, ...]]:
    """The backend's function. Its operators, with `prefix` before their names, are registered by ``define(schema,
    function, fake)``."""
    _OPERATORS[prefix] = (
        define(prefix + FWD, strategy.forward, strategy.fake_forward),
        define(prefix + BWD, strategy.backward, _fake_backward),
    )
    _SCALE[prefix] = strategy.scale_
    forward, chunk_size, cpu = _OPERATORS[prefix][0], strategy.chunk_size, strategy.kernels.cpu

    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
        options: LinearLossOptions,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        needs = _NOTHING
        if torch.is_grad_enabled():
            needs = Needs(hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
        options = options._replace(chunk_size=chunk_size(hidden, weight, options, needs))
        inputs = Inputs(hidden, weight, target, bias, class_weight)
        if options.token_scaling and options.tiles:
            # The backward pass computes the logits again anyway, so a gradient for each token costs nothing.
            unscaled = options._replace(token_scaling=False, reduction="none", return_lse=True)
            each, lse, z, predicted = linear_cross_entropy(*inputs, unscaled)
            rounded = chunks.dtype_of_products(hidden, weight.shape[0]) if cpu else hidden.dtype
            with torch.no_grad(), no_autocast(hidden):
                p = target_probabilities(inputs, lse, options, rounded)
            loss, z = scaled(each, z, p, target, class_weight, options)
            return loss, lse, z, predicted
        if any(needs):
            loss, lse, low, z, predicted = apply(_LinearCrossEntropy, prefix, *inputs, options)
            if options.return_lse:
                lse = apply(_Lse, prefix, lse, low, hidden, weight, target, bias, options)
            return loss, lse, z, predicted
        saves = Saves(options.return_lse, options.return_z_loss, False, options.return_predictions)
        loss, lse, _, z, *_, predicted = forward(*inputs, *options.operator_args(), *saves, *_NOTHING)
        return loss, lse, z, predicted

    return linear_cross_entropy


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prefix: str, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        class_weight: Tensor | None, options: LinearLossOptions,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        _, need_dhidden, need_dweight, _, need_dbias, *_ = ctx.needs_input_grad
        ctx.needs = (need_dhidden, need_dweight, need_dbias)
        ctx.options, ctx.recomputes = options.operator_args(), options.reduction == "none" or options.tiles
        ctx.prefix, ctx.dtype = prefix, hidden.dtype
        save_lse = options.return_lse or ctx.recomputes
        loss, lse, low, z, dscale, *gradients, predicted = _OPERATORS[prefix][0](
            hidden, weight, target, bias, class_weight, *ctx.options,
            save_lse, options.return_z_loss, save_lse, options.return_predictions,
            *(_NOTHING if ctx.recomputes else ctx.needs),
        )  # fmt: skip
        if ctx.recomputes:
            ctx.save_for_backward(hidden, weight, target, bias, class_weight, lse, low)
        else:
            ctx.save_for_backward(dscale, *gradients)
        ctx.mark_non_differentiable(lse, low, z, predicted)
        return loss, lse, low, z, predicted

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> Any:
        refuse_second_derivative("linear_cross_entropy")
        if ctx.recomputes:
            found = _OPERATORS[ctx.prefix][1](dloss, *ctx.saved_tensors, *ctx.options, *ctx.needs)
        else:
            dscale, *gradients = ctx.saved_tensors
            factor = dloss * dscale
            found = [times_own_gradient(g, factor, ctx.dtype, _SCALE[ctx.prefix]) for g in gradients]
        dhidden, dweight, dbias = (g if n else None for g, n in zip(found, ctx.needs, strict=True))
        return None, dhidden, dweight, None, dbias, None, None


class _Lse(torch.autograd.Function):
    """The lse of a call with its own gradient, which computes the logits once more. A function of its own, so that an
    lse without a gradient costs nothing, under torch.compile too."""

    @staticmethod
    def forward(
        ctx: Any, prefix: str, lse: Tensor, lse_low: Tensor, hidden: Tensor, weight: Tensor, target: Tensor,
        bias: Tensor | None, options: LinearLossOptions,
    ) -> Tensor:  # fmt: skip
        *_, need_dhidden, need_dweight, _, need_dbias, _ = ctx.needs_input_grad
        ctx.prefix, ctx.needs = prefix, (need_dhidden, need_dweight, need_dbias)
        ctx.options = (
            options.ignore_index, options.logit_scale, options.softcap, options.chunk_size, options.batch_invariant
        )  # fmt: skip
        ctx.save_for_backward(hidden, weight, target, bias, lse, lse_low)
        return lse.clone()

    @staticmethod
    def backward(ctx: Any, dlse: Tensor) -> Any:
        refuse_second_derivative("linear_cross_entropy")
        drows = torch.stack([torch.zeros_like(dlse), dlse], -1)
        found = LSE_BACKWARD[ctx.prefix](drows, *ctx.saved_tensors, *ctx.options, *ctx.needs)
        dhidden, dweight, dbias = (x if n else None for x, n in zip(found, ctx.needs, strict=True))
        return None, None, None, dhidden, dweight, None, dbias, None


def times_own_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype, scale_: Any) -> Tensor:
    """gradient * factor, rounded once; skipping the multiplication by 1 if reading the factor does not wait: on a CPU,
    or in a kernel on the device.

    Of a graph that is retained the next backward pass needs `gradient`, so it is not handed out."""
    plain = type(factor) is Tensor and not torch.compiler.is_compiling()
    if plain and not (gradient.dtype == dtype and _graph_is_retained()):
        if factor.device.type == "cpu" and factor.item() == 1.0:
            return gradient.to(dtype)
        if scale_ is not None and gradient.is_cuda and gradient.dtype == dtype and gradient.is_contiguous():
            scale_(gradient, factor)
            return gradient
    if gradient.dtype == dtype or torch.compiler.is_compiling():  # a compiler makes one loop of it
        return (gradient * factor).to(dtype)
    out = torch.empty_like(gradient, dtype=dtype)
    for part, g in zip(out.split(_ROWS), gradient.split(_ROWS), strict=True):
        part.copy_(g * factor)
    return out
