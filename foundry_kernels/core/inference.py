"""Calls without a backward pass or a second derivative, whose results may still be used in autograd.

Outside of `torch.no_grad` the weights of a model require gradients, whether or not a backward pass follows. So such a
call runs, and its results require gradients: a backward pass through them raises an error. Results without a graph
would lose gradients silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autograd import apply

_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")
_LIBRARY.define("refuse_backward(Tensor dout, str why) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def _refuse(dout: Tensor, why: str) -> Tensor:
    raise RuntimeError(why)


_LIBRARY.impl("refuse_backward", _refuse, "CompositeExplicitAutograd")
torch.library.register_fake("foundry_kernels::refuse_backward", lambda dout, why: dout.new_empty(()), lib=_LIBRARY)


class _WithoutBackward(torch.autograd.Function):
    @staticmethod
    def forward(why: str, x: Tensor, *inputs: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # Not the inputs themselves: a cache may be written to before the backward pass.
        ctx.why, ctx.shapes = inputs[0], [x.shape for x in inputs[1:]]

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Any:
        if not torch.compiler.is_compiling():
            raise RuntimeError(ctx.why)
        # This is an operator because the compiler traces it together with the forward pass, which must run.
        refused = torch.ops.foundry_kernels.refuse_backward(dout, ctx.why)
        return None, *(refused.expand(shape) for shape in ctx.shapes)


def recorded(*inputs: Any) -> list[Tensor]:
    """The tensors among `inputs` that autograd records."""
    return [x for x in inputs if isinstance(x, Tensor) and x.requires_grad] if torch.is_grad_enabled() else []


def cut(*inputs: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Returns (wanted, inputs): the `recorded` tensors and, if there are any, all inputs detached from their graphs."""
    wanted = recorded(*inputs)
    return wanted, tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs) if wanted else inputs


def without_backward(results: Iterable[Tensor], wanted: list[Tensor], why: str) -> tuple[Tensor, ...]:
    """Returns `results`, which were computed without a graph. If `wanted` is not empty they are copies, and a backward
    pass through one of them raises RuntimeError with the message `why`."""
    return tuple(apply(_WithoutBackward, why, x, *wanted) if wanted else x for x in results)


def refuse_second_derivative(op: str) -> None:
    """Raises if the backward pass of an operation without a second derivative is itself differentiated."""
    # torch.compile traces the backward pass with gradients enabled, so that create_graph cannot be seen there.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{op} has no second derivative: backward was called with create_graph=True")
