"""Calls of a patched model whose logits are not computed: see `deferred.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.integrations.adapters.head import on_mesh, replicated
from foundry_kernels.integrations.adapters.lora_layers import Served

running = threading.local()  # its `deferral`; torch.compile can trace it, unlike a ContextVar


def current() -> Deferral | None:
    """Returns the innermost call in this thread whose logits are deferred, or None."""
    return getattr(running, "deferral", None)


class Deferral:
    """A call of a patched model in which `head` returns DeferredLogits.

    backend: of the loss. asked: whether the call is for log-probabilities, so that its loss is not needed.
    """

    def __init__(self, head: nn.Module, backend: str, asked: bool = False) -> None:
        self.head, self.backend, self.asked = head, backend, asked
        self.grad = torch.is_grad_enabled()
        self.hooks = _saving_hooks()
        self.calls: list[HeadCall] = []

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Returns what `function` returns, during whose call the head is deferred."""
        outer = current()
        running.deferral = self
        try:
            return function(*args, **kwargs)
        finally:
            running.deferral = outer
            for call in self.calls:
                call.members = []  # which refer to the call in turn: they are freed without the garbage collector

    def is_same_run(self) -> bool:
        """Returns whether this is not a part of the call that is computed again for its gradient, outside of the call:
        then the head must be called both times."""
        return torch.is_grad_enabled() == self.grad and _saving_hooks() is self.hooks


def _saving_hooks() -> Any:
    """Returns the hooks on tensors that autograd saves; non-reentrant checkpoints have some of their own."""
    if is_compiling():
        return None
    found = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if found is None else found[0]


class HeadCall:
    """One call of the head that was not made: its input, and the modes in which it would have run.

    adapter: what the head adds to ``hidden @ weight.T + bias``, if anything.
    members: the DeferredLogits that come from it and have not been computed, in the order in which they were made.
    lost: whether a loss has been computed from it.
    """

    def __init__(
        self, deferral: Deferral, head: nn.Module, hidden: Tensor, weight: Tensor, bias: Tensor | None,
        adapter: Served | None = None,
    ) -> None:  # fmt: skip
        self.deferral, self.head, self.hidden, self.weight, self.bias = deferral, head, hidden, weight, bias
        self.rows = on_mesh(hidden, head) if is_dtensor(weight) else hidden
        self.grad, self.low = torch.is_grad_enabled(), autocast_dtype(hidden)
        self.version = None if is_compiling() or hidden.is_inference() else hidden._version
        if adapter is not None and is_dtensor(weight):
            adapter = adapter._replace(a=replicated(adapter.a, weight), b=replicated(adapter.b, weight))
        self.adapter = adapter
        self.members: list[Any] = []
        self.lost = False

    def check(self) -> None:
        if self.version is not None and self.hidden._version != self.version:
            raise RuntimeError(
                f"the input of {type(self.head).__name__} was changed in place before its logits were used; "
                "patch(model, return_logits=True) computes them at once"
            )

    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.adapter is None else (self.weight, self.adapter.a, self.adapter.b)

    def pair(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns what a loss adds to the logits of these rows of the input."""
        if self.adapter is None:
            return {}
        return {"low": self.run(self.adapter.low, rows, grad=self.grad), "up": self.adapter.b}

    def run(self, function: Callable[..., Any], *args: Any, grad: bool | None = None, **kwargs: Any) -> Any:
        """Returns what `function` returns, under the autocast of the call of the head. grad: the grad mode."""
        self.check()
        grad = torch.is_grad_enabled() if grad is None else grad
        same = autocast_dtype(self.hidden) == self.low
        if same and torch.is_grad_enabled() == grad:
            return function(*args, **kwargs)
        device = self.hidden.device.type
        cast: Any = nullcontext() if same else torch.autocast(device, dtype=self.low, enabled=self.low is not None)
        with torch.set_grad_enabled(grad), cast:
            return function(*args, **kwargs)

    def release(self) -> None:
        """Computes all logits that come from this call. From then on they are tensors, so that what writes to one of
        them is seen in its views."""
        members, self.members = self.members, []
        for member in members:
            member.tensor()
