"""The two operators of a loss on a backend, forward and backward, the autograd function around them, and the backend's
function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear_loss import chunks, class_blocks, sizes
from foundry_kernels.ops._linear_loss.problem import (
    GRADIENTS,
    NOTHING,
    TILES,
    Call,
    Inputs,
    Loss,
    Needs,
    RowKernel,
)

_NEEDS = ", ".join(f"bool need_{gradient}" for gradient in GRADIENTS[1:])

#: How many tensors the operators take before the constants.
N_INPUTS = len(Inputs._fields)

#: Rows of a gradient that are widened at a time: the copy stays in the cache.
_ROWS = 4096

#: Whether the backward pass that is running may be followed by another one through the same graph.
_graph_is_retained = torch._C._autograd._get_current_graph_task_keep_graph


class Operators(NamedTuple):
    """The operators of a loss with a backend's kernel."""

    loss: Loss
    rows: type[RowKernel]

    def schemas(self) -> tuple[str, str]:
        """The schemas of the forward and the backward operator."""
        loss = self.loss
        inputs = ["Tensor hidden", "Tensor weight", "Tensor target", "Tensor? bias", "Tensor? low", "Tensor? up"]
        inputs += [f"Tensor? {name}" for name in loss.constants]
        fwd = [*inputs, loss.options.SCHEMA, *(f"bool {flag}" for flag in loss.flags.values())]
        fwd += [_NEEDS] if loss.makes_gradients else []
        incoming = "Tensor dloss" if loss.rows_of is None else "Tensor drows"
        bwd = [incoming, *inputs, *(f"Tensor {name}" for name in loss.saved), loss.options.SCHEMA, _NEEDS]
        results = [f"Tensor {name}" for name in loss.outputs]
        return (
            f"{loss.name}_fwd({', '.join(fwd)}) -> ({', '.join(results)})",
            f"{loss.name}_bwd({', '.join(bwd)}) -> ({', '.join(f'Tensor {gradient}' for gradient in GRADIENTS[1:])})",
        )

    def _tensors(self, args: tuple[Any, ...]) -> tuple[Inputs, tuple[Tensor | None, ...], tuple[Any, ...]]:
        """The inputs and the constants at the front of an operator's arguments, and the others."""
        n = N_INPUTS + len(self.loss.constants)
        return Inputs(*args[:N_INPUTS]), args[N_INPUTS:n], args[n:]

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        loss, (inputs, constants, others) = self.loss, self._tensors(args)
        options, flags = loss.options.from_operator_args(others)
        with no_autocast(inputs.hidden):
            rows = self.rows(inputs, constants, options)
            call = Call(loss, rows, inputs, options, loss.needs(flags), loss.wanted(flags))
            found = (class_blocks if options.chunk_size == TILES and rows.has_blocks else chunks).forward(call)
            absent = found[loss.outputs[0]].new_empty
        dtypes = dict.fromkeys(loss.classes, torch.int64)
        return tuple([found[n] if n in found else absent(0, dtype=dtypes.get(n)) for n in loss.outputs])

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        """All that is asked for, in new memory, in the dtype of the arithmetic; gradients as chunks make them."""
        loss, (inputs, _, others) = self.loss, self._tensors(args)
        options, flags = loss.options.from_operator_args(others)
        needs, wanted, hidden = loss.needs(flags), loss.wanted(flags), inputs.hidden
        shapes: dict[str, Any] = dict.fromkeys(wanted, hidden.shape[:-1])
        if options.reduction != "none":
            shapes |= dict.fromkeys(wanted.intersection(loss.reduced), ())
        dtypes = dict.fromkeys(loss.classes, torch.int64)
        if any(needs):
            shapes |= {"dscale": ()} | {
                n: s for n, s, needed in zip(GRADIENTS[1:], _shapes(inputs), needs, strict=True) if needed
            }
            dtypes |= zip(  # those of low and up are in the dtype of the arithmetic
                GRADIENTS[1:4], chunks.gradient_dtypes(hidden, inputs.weight, options, self.rows.cpu), strict=True
            )
        wide = wide_dtype(hidden.dtype)
        return tuple([hidden.new_empty(shapes.get(n, (0,)), dtype=dtypes.get(n, wide)) for n in loss.outputs])

    def backward(self, dloss: Tensor, *args: Any) -> tuple[Tensor, ...]:
        loss, (inputs, constants, others) = self.loss, self._tensors(args)
        saved, others = others[: len(loss.saved)], others[len(loss.saved) :]
        options, needs = loss.options.from_operator_args(others)
        with no_autocast(inputs.hidden):
            call = Call(loss, self.rows(inputs, constants, options), inputs, options, Needs(*needs))
            return (class_blocks if options.chunk_size == TILES else chunks).backward(call, dloss, *saved)


def _shapes(inputs: Inputs) -> tuple[Any, ...]:
    """The shapes of the gradients, in the order of GRADIENTS."""
    hidden, weight, _, _, low, up = inputs
    of_pair = ((0,) if x is None else x.shape for x in (low, up))
    return hidden.shape, weight.shape, weight.shape[:1], *of_pair


def fake_backward(dloss: Tensor, *args: Any) -> tuple[Tensor, ...]:
    inputs, needs = Inputs(*args[:N_INPUTS]), Needs(*args[-len(Needs._fields) :])
    hidden = inputs.hidden
    wide = wide_dtype(hidden.dtype)
    dtypes = (hidden.dtype, hidden.dtype, hidden.dtype, wide, wide)
    return tuple(
        hidden.new_empty(s if needed else (0,), dtype=dtype)
        for s, needed, dtype in zip(_shapes(inputs), needs, dtypes, strict=True)
    )


class Backend(NamedTuple):
    """scale: see `times_own_gradient`; None where that is PyTorch's."""

    loss: Loss
    forward: Callable[..., tuple[Tensor, ...]]
    backward: Callable[..., tuple[Tensor, ...]]
    scale: Callable[[Tensor, Tensor, Tensor], None] | None


#: The backends of the losses by the name of the loss with the prefix of its operators, which torch.compile can look up.
BACKENDS: dict[str, Backend] = {}


def make_backend(
    loss: Loss, rows: type[RowKernel], prefix: str, define: Callable[..., Any],
    scale: Callable[[Tensor, Tensor, Tensor], None] | None = None,
) -> Callable[..., dict[str, Tensor]]:  # fmt: skip
    """The backend's function, of the `Inputs`, the constants and the options, which returns the results that the
    options request. Its operators, with `prefix` before their names, are registered by ``define(schema,
    function, fake)``."""
    name, operators = prefix + loss.name, Operators(loss, rows)
    fwd, bwd = operators.schemas()
    forward = define(prefix + fwd, operators.forward, operators.fake_forward)
    BACKENDS[name] = Backend(loss, forward, define(prefix + bwd, operators.backward, fake_backward), scale)

    def results(inputs: tuple[Tensor | None, ...], options: Any, needs: Needs) -> dict[str, Tensor]:
        """All results; those that are not requested may be empty."""
        if any(needs):
            return dict(zip(loss.results, apply(_LinearLoss, name, options, *inputs), strict=True))
        requested = options.results()
        flags = [result in requested for result in loss.flags]
        found = forward(*inputs, *options.operator_args(), *flags, *(NOTHING if loss.makes_gradients else ()))
        return dict(zip(loss.outputs, found, strict=True))

    def linear_loss(hidden: Tensor, weight: Tensor, target: Tensor, *others_and_options: Any) -> dict[str, Tensor]:
        others, options = others_and_options[:-1], others_and_options[-1]
        needs = NOTHING
        if torch.is_grad_enabled():
            with_gradient = (hidden, weight, *others[: N_INPUTS - 3])
            needs = Needs(*[x is not None and x.requires_grad for x in with_gradient])
        options = options._replace(chunk_size=sizes.chosen(loss, rows.cpu, hidden, weight, options, needs))
        inputs = (hidden, weight, target, *others)
        if loss.around is None:
            found = results(inputs, options, needs)
        else:
            found = loss.around(results, prefix, inputs, options, needs)
        return {result: found[result] for result in options.results()}

    return linear_loss


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str, options: Any, *inputs: Any) -> tuple[Tensor, ...]:
        loss = BACKENDS[name].loss
        _, _, need_dhidden, need_dweight, _, *others = ctx.needs_input_grad
        ctx.name, ctx.options, ctx.returned = name, options.operator_args(), options.results()
        ctx.needs = (need_dhidden, need_dweight, *others[: N_INPUTS - 3])
        ctx.dtypes = [inputs[0].dtype if x is None else x.dtype for i, x in enumerate(inputs[:N_INPUTS]) if i != 2]
        ctx.recomputes = options.reduction == "none" or options.chunk_size == TILES
        saves = ctx.recomputes or any(result in loss.saved for result in ctx.returned)
        flags = [result in ctx.returned or (saves and result in loss.saved) for result in loss.flags]
        needs = (NOTHING if ctx.recomputes else ctx.needs) if loss.makes_gradients else ()
        found = dict(zip(loss.outputs, BACKENDS[name].forward(*inputs, *ctx.options, *flags, *needs), strict=True))
        if ctx.recomputes:
            ctx.save_for_backward(*inputs, *[found[result] for result in loss.kept])
        else:
            ctx.save_for_backward(*[found[gradient] for gradient in GRADIENTS])
        constant = [result for result in loss.results[1:] if result not in loss.differentiable]
        ctx.mark_non_differentiable(*[found[result] for result in constant])
        ctx.set_materialize_grads(loss.rows_of is None)
        return tuple([found[result] for result in loss.results])

    @staticmethod
    def backward(ctx: Any, dloss: Any, *others: Tensor | None) -> Any:
        loss, stored = BACKENDS[ctx.name].loss, ctx.saved_tensors
        refuse_second_derivative(loss.name)
        if ctx.recomputes:
            n = N_INPUTS + len(loss.constants)
            inputs, kept = stored[:n], dict(zip(loss.kept, stored[n:], strict=True))
            if loss.rows_of is not None:
                # torch.compile materializes the gradients of results that nobody gets.
                given = zip(loss.results, (dloss, *others), strict=True)
                dloss = loss.rows_of({result: d if result in ctx.returned else None for result, d in given}, kept)
            saved = [kept[result] for result in loss.saved]
            found = BACKENDS[ctx.name].backward(dloss, *inputs, *saved, *ctx.options, *ctx.needs)
        else:
            dscale, *gradients = stored
            factor = dloss * dscale if ctx.dtypes[0] == torch.float16 else dloss  # elsewhere dscale is 1
            scale = BACKENDS[ctx.name].scale
            pairs = zip(gradients, ctx.dtypes, strict=True)
            found = tuple([times_own_gradient(g, factor, dtype, scale) for g, dtype in pairs])
        dhidden, dweight, *rest = (g if n else None for g, n in zip(found, ctx.needs, strict=True))
        return None, None, dhidden, dweight, None, *rest, *[None] * len(loss.constants)


def times_own_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype, scale: Any) -> Tensor:
    """gradient * factor, rounded once; skipping the multiplication by 1 if reading the factor does not wait: on a CPU,
    or in a kernel on the device, ``scale(gradient, factor, out)``.

    Of a graph that is retained the next backward pass needs `gradient`, so it is not handed out."""
    if type(factor) is Tensor and not torch.compiler.is_compiling():
        in_place = gradient.dtype == dtype and not _graph_is_retained()
        if scale is not None and gradient.is_cuda and gradient.is_contiguous():
            out = gradient if in_place else torch.empty_like(gradient, dtype=dtype)
            scale(gradient, factor, out)
            return out
        if (in_place or gradient.dtype != dtype) and factor.device.type == "cpu" and factor.item() == 1.0:
            return gradient.to(dtype)
    if gradient.dtype == dtype or torch.compiler.is_compiling():  # a compiler makes one loop of it
        return (gradient * factor).to(dtype)
    out = torch.empty_like(gradient, dtype=dtype)
    for part, g in zip(out.split(_ROWS), gradient.split(_ROWS), strict=True):
        part.copy_(g * factor)
    return out
