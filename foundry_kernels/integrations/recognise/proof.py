"""Proves by numbers that an adapter computes what a class computes: on a small copy, in every dtype, with gradients,
under autocast, in training and in evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import Gated, State
from foundry_kernels.integrations.adapters.subclass import make_class
from foundry_kernels.integrations.recognise.reach import LeftError

Call = Callable[..., Tensor]
LOW = (torch.bfloat16, torch.float16)


def clone(module: Any) -> Any:
    """Returns a copy of a small copy, with its own parameters; what else it holds is shared."""
    cls: Any = type(module)
    made = cls.__new__(cls)
    vars(made).update(vars(module))
    made._parameters = {
        name: None if p is None else nn.Parameter(p.detach().clone()) for name, p in module._parameters.items()
    }
    made._modules = {name: None if part is None else clone(part) for name, part in module._modules.items()}
    return made


def call(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Returns the module's result.

    Raises:
        LeftError: it fails, changes its input, or its result is no tensor.
    """
    before = [(x.detach().clone(), x._version) for x in inputs]
    try:
        y: Any = module(*inputs)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:120]
        raise LeftError(f"a small copy of it raises {type(error).__name__}: {reason}") from error
    if any(x._version != version or not torch.equal(x, old) for x, (old, version) in zip(inputs, before, strict=True)):
        raise LeftError("it writes to its input")
    if type(y) is not Tensor:
        raise LeftError(f"its result is a {type(y).__name__}")
    return y


def steady(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Returns the module's result, which is the same when it trains, and when it is called again."""
    first = call(module, *inputs)
    second = call(module.eval(), *inputs)
    third = call(module.train(), *inputs)
    if not (torch.equal(first, second) and torch.equal(first, third)):
        raise LeftError("two calls of it differ")
    return first


def adapted(module: nn.Module, adapter: Any) -> Any:
    """Returns a copy of a module that runs on the references, by the adapter."""
    made = clone(module)
    ops = dict.fromkeys(adapter.ops(made), "reference")
    made.__class__ = make_class(type(module), adapter)
    gelu = adapter.activation(made) if isinstance(adapter, Gated) else None
    made._foundry = State(ops, gelu=gelu[1] if gelu else "none")
    return made


def gradients(module: nn.Module, inputs: Sequence[Tensor], direction: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the result, and the gradients of the inputs and of the parameters."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    y = call(module, *leaves)
    wanted = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
    found = torch.autograd.grad(y, wanted, direction.to(y.dtype), allow_unused=True)
    return y.detach(), [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]


def close(ours: Tensor, theirs: Tensor, tolerance: float) -> bool:
    """Returns whether two results are the same within `tolerance` of the largest value of each row."""
    if ours.shape != theirs.shape:
        return False
    ours, theirs = (x.double().reshape(-1, x.shape[-1]) for x in (ours, theirs))
    return bool(((ours - theirs).abs() <= tolerance * theirs.abs().amax(-1, keepdim=True)).all())


def no_worse(ours: Tensor, theirs: Tensor, exact: Tensor, epsilon: float) -> bool:
    """Returns whether our error is within the module's own: twice its largest one, 1.3 times its mean, and half a unit
    of rounding of the values."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    scale = exact.double()
    error, own = (x.double() - scale for x in (ours, theirs))
    largest = error.abs().max() <= 2 * own.abs().max() + 0.5 * epsilon * scale.abs().max()
    return bool(largest) and bool(rms(error) <= 1.3 * rms(own) + 0.5 * epsilon * rms(scale))


def as_exact_in_all(ours: Tensor, theirs: Tensor, exact: Tensor) -> bool:
    """Returns whether our mean error is within twice the module's own and 5 % of the values."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    error, own = (rms(x.double() - exact.double()) for x in (ours, theirs))
    return bool(error <= 2 * own + 0.05 * rms(exact.double()))


def rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()
