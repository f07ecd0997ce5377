"""The two operators of a backend, forward and backward, and the autograd function around them.

They are the chunks of linear_cross_entropy with another kernel between the matmuls: it gets a chunk's logits of student
and teacher, and makes the losses and over the student's logits their gradient, in one go. So a reduced loss takes one
matmul for the teacher and three for the student. With reduction "none" the gradients of the losses are known later: the
backward pass does the same again, with these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.autocast import no_autocast
from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.kl_div.options import KlDivOptions
from foundry_kernels.ops.linear_cross_entropy import chunks
from foundry_kernels.ops.linear_cross_entropy.calls import Inputs, Kernels, Needs, Saves, empty_outputs
from foundry_kernels.ops.linear_cross_entropy.operators import times_own_gradient
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions
from foundry_kernels.ops.linear_kl_div.options import LinearKlDivOptions
from foundry_kernels.ops.linear_kl_div.teacher import Teacher, TeacherLogits

_INPUTS = (
    "Tensor hidden, Tensor weight, Tensor target, Tensor? bias, Tensor? teacher_hidden, Tensor? teacher_weight, "
    "Tensor? teacher_bias, Tensor? teacher_logits"
)
_NEEDS = "bool need_dhidden, bool need_dweight, bool need_dbias"
FWD = (
    f"linear_kl_div_fwd({_INPUTS}, {LinearKlDivOptions.SCHEMA}, {_NEEDS}) -> (Tensor loss, Tensor dscale, "
    "Tensor dhidden, Tensor dweight, Tensor dbias)"
)
BWD = (
    f"linear_kl_div_bwd(Tensor dloss, {_INPUTS}, {LinearKlDivOptions.SCHEMA}, {_NEEDS}) "
    "-> (Tensor dhidden, Tensor dweight, Tensor dbias)"
)
_NOTHING = Needs(False, False, False)
_NO_RESULTS = Saves(False, False, False, False)


class Strategy(NamedTuple):
    """What a backend's operators do.

    rows: of (logits, teacher_logits, target, options, dloss) each token's loss; with `dloss`, the gradient of each
    token's loss, the logits' own gradient is written over them. cpu, chunk_size, scale_: as for linear_cross_entropy.
    """

    rows: Callable[[Tensor, Tensor, Tensor, KlDivOptions, Tensor | None], Tensor]
    cpu: bool
    chunk_size: Callable[[Tensor, Tensor, LinearLossOptions, Needs], int | None]
    scale_: Callable[[Tensor, Tensor], None] | None = None

    def kernels(self, inputs: Inputs, teacher: Teacher, options: LinearKlDivOptions) -> Kernels:
        """Those of one call, which take the teacher's logits as `chunks` takes the student's."""
        of_teacher = TeacherLogits(teacher, inputs.target, options.of_loss(), self.cpu)
        of_logits, rows = options.of_logits(), self.rows

        def forward(logits: Tensor, target: Tensor, *rest: Any) -> tuple[Tensor, ...]:
            loss = rows(logits, of_teacher.next(logits.shape[0]), target, of_logits, rest[-1])
            return loss, *(loss.new_empty(0) for _ in range(3))

        def gradients_(logits: Tensor, dloss: Tensor, target: Tensor, *_: Any) -> None:
            rows(logits, of_teacher.next(logits.shape[0]), target, of_logits, dloss)

        return Kernels(forward, gradients_, self.cpu, _no_classes)

    def forward(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, teacher, options, needs = _call(args)
        with no_autocast(inputs.hidden):
            kernels = self.kernels(inputs, teacher, options)
            return _results(chunks.forward(kernels, inputs, options.of_loss(), _NO_RESULTS, needs))

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        inputs, _, options, needs = _call(args)
        dtypes = chunks.gradient_dtypes(inputs.hidden, inputs.weight, options.of_loss(), self.cpu)
        return _results(empty_outputs(inputs, options.of_loss(), _NO_RESULTS, needs, dtypes))

    def backward(self, dloss: Tensor, *args: Any) -> tuple[Tensor, ...]:
        inputs, teacher, options, needs = _call(args)
        with no_autocast(inputs.hidden):
            kernels = self.kernels(inputs, teacher, options)
            # The kernel needs no lse: it finds the normalizers again.
            return chunks.backward(kernels, dloss, inputs, dloss, dloss, options.of_loss(), needs)


def _call(args: tuple[Any, ...]) -> tuple[Inputs, Teacher, LinearKlDivOptions, Needs]:
    options, needs = LinearKlDivOptions.from_operator_args(args[8:])
    hidden, weight, target, bias, *of_teacher = args[:8]
    return Inputs(hidden, weight, target, bias, None), Teacher(*of_teacher), options, Needs(*needs)


def _results(found: Any) -> tuple[Tensor, ...]:
    return found.loss, found.dscale, found.dhidden, found.dweight, found.dbias


def _no_classes(*_: int) -> int:
    raise AssertionError("there are no blocks of classes")


def _fake_backward(dloss: Tensor, hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    shapes = (hidden.shape, weight.shape, weight.shape[:1])
    return tuple(hidden.new_empty(s if needed else (0,)) for s, needed in zip(shapes, rest[-3:], strict=True))


#: The forward and the backward operator by the prefix of their names, which torch.compile can look up; and `scale_`.
_OPERATORS: dict[str, tuple[Any, Any]] = {}
_SCALE: dict[str, Any] = {}


def make_backend(prefix: str, define: Callable[..., Any], strategy: Strategy) -> Callable[..., Tensor]:
    """The backend's function. Its operators, with `prefix` before their names, are registered by ``define(schema,
    function, fake)``."""
    _OPERATORS[prefix] = (
        define(prefix + FWD, strategy.forward, strategy.fake_forward),
        define(prefix + BWD, strategy.backward, _fake_backward),
    )
    _SCALE[prefix] = strategy.scale_
    forward, chunk_size = _OPERATORS[prefix][0], strategy.chunk_size

    def linear_kl_div(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, teacher: Teacher,
        options: LinearKlDivOptions,
    ) -> Tensor:  # fmt: skip
        needs = _NOTHING
        if torch.is_grad_enabled():
            needs = Needs(hidden.requires_grad, weight.requires_grad, bias is not None and bias.requires_grad)
        options = options._replace(chunk_size=chunk_size(hidden, weight, options.of_loss(), needs))
        inputs = (hidden, weight, target, bias, *teacher)
        if any(needs):
            loss: Tensor = apply(_LinearKlDiv, prefix, *inputs, options)
            return loss
        return forward(*inputs, *options.operator_args(), *_NOTHING)[0]

    return linear_kl_div


class _LinearKlDiv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prefix: str, *args: Any) -> Tensor:
        (*inputs, options), needs = args, ctx.needs_input_grad
        ctx.prefix, ctx.options, ctx.dtype = prefix, options.operator_args(), inputs[0].dtype
        ctx.needs, ctx.recomputes = (needs[1], needs[2], needs[4]), options.reduction == "none"
        loss, *saved = _OPERATORS[prefix][0](*inputs, *ctx.options, *(_NOTHING if ctx.recomputes else ctx.needs))
        ctx.save_for_backward(*(inputs if ctx.recomputes else saved))
        return loss

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        refuse_second_derivative("linear_kl_div")
        if ctx.recomputes:
            found = _OPERATORS[ctx.prefix][1](dloss, *ctx.saved_tensors, *ctx.options, *ctx.needs)
        else:
            dscale, *gradients = ctx.saved_tensors
            factor = dloss * dscale
            found = [times_own_gradient(g, factor, ctx.dtype, _SCALE[ctx.prefix]) for g in gradients]
        dhidden, dweight, dbias = (g if n else None for g, n in zip(found, ctx.needs, strict=True))
        return None, dhidden, dweight, None, dbias, None, None, None, None, None
