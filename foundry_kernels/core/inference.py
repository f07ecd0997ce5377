"""Calls that have a forward pass alone, or no second derivative, where a gradient could be wanted of what they return.

Outside of `torch.no_grad` the weights of any model require gradients, whether or not a backward pass follows. So such a
call runs, and what it returns requires a gradient too: the backward pass raises, where results without a graph would
lose gradients and say nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

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
        # An operator, since the compiler traces this together with the forward pass, which is to run.
        refused = torch.ops.foundry_kernels.refuse_backward(dout, ctx.why)
        return None, *(refused.expand(shape) for shape in ctx.shapes)


def recorded(*inputs: Any) -> list[Tensor]:
    """Those tensors among `inputs` that a gradient may be wanted of."""
    return [x for x in inputs if isinstance(x, Tensor) and x.requires_grad] if torch.is_grad_enabled() else []


def cut(*inputs: Any) -> tuple[list[Tensor], tuple[Any, ...]]:
    """(wanted, inputs): what is `recorded`, and where there is any, all tensors without their graphs."""
    wanted = recorded(*inputs)
    return wanted, tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs) if wanted else inputs


def without_backward(results: Iterable[Tensor], wanted: list[Tensor], why: str) -> tuple[Tensor, ...]:
    """`results`, which were computed without a graph: where a gradient may be wanted of something, copies, and a
    backward pass through one of them raises RuntimeError with the message `why`."""
    return tuple(_WithoutBackward.apply(why, x, *wanted) if wanted else x for x in results)


def refuse_second_derivative(op: str) -> None:
    """Raise if the backward pass of an operation without a second derivative is itself to be differentiated."""
    # torch.compile traces the backward pass with gradients enabled, so that create_graph cannot be seen there.
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        raise RuntimeError(f"{op} has no second derivative: backward was called with create_graph=True")
