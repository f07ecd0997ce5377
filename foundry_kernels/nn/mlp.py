"""The feed-forward block as a module: with a gate, or without one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from foundry_kernels.core.dropout import draw_seed
from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._layers import is_linear, is_plain
from foundry_kernels.nn._linear_layers import layers_for
from foundry_kernels.nn._scripting import refuse_scripting
from foundry_kernels.ops._linear import Linear
from foundry_kernels.ops.bias_gelu import bias_gelu, bias_relu, bias_silu
from foundry_kernels.ops.swiglu import geglu, glu, reglu, swiglu

RECOMPUTE = ("none", "product", "projections")

#: Operation and function of each gated activation.
GATES: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "swiglu": ("swiglu", swiglu),
    "geglu": ("geglu", geglu),
    "geglu_tanh": ("geglu", partial(geglu, approximate="tanh")),
    "glu": ("glu", glu),
    "reglu": ("reglu", reglu),
}


#: Operation and function of each activation without a gate.
ACTIVATIONS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "gelu": ("bias_gelu", bias_gelu),
    "gelu_tanh": ("bias_gelu", partial(bias_gelu, approximate="tanh")),
    "silu": ("bias_silu", bias_silu),
    "relu": ("bias_relu", bias_relu),
}


class GatedMLP(torch.nn.Module):
    """``w2(activation(w1 x) * w3 x)``; the names are those of Meta's Llama.

    Args:
        dim: width D of the input and the output.
        hidden_dim: width N between.
        activation: "swiglu" (SiLU), "geglu" (GELU), "geglu_tanh" (its tanh approximation), "glu" (the logistic
            function) or "reglu" (ReLU).
        bias: whether the three projections have one.
        recompute: what the backward pass recomputes instead of saving it in the forward pass. In elements per token,
            with all weights trained, "none" saves x, w1 x, w3 x and their gated product: ``D + 3N``. "product" saves
            ``D + 2N`` and recomputes the gated product, one pass over memory. "projections" saves ``D``, and repeats
            the matmuls with w1 and w3. The results are bitwise the same. Layers that were replaced or have hooks or
            biases are called as they are, and save what they need.
        dropout: dropout of the gated product in training, fused into its kernel. No mask is saved: it is a function of
            a seed, which each call draws from the default generator of x's device.
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: a width below 1, a dropout outside [0, 1), an unknown `activation`, `recompute` or backend.

    Shazeer, "GLU Variants Improve Transformer", 2020, arXiv:2002.05202.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        recompute: str = "product",
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        _check(dim, hidden_dim, activation, GATES, recompute, RECOMPUTE)
        self.dropout = check_dropout(dropout)
        self.activation, self.recompute = activation, recompute
        self.op, self._gate = GATES[activation]
        self.backends = plan(backend, (self.op,))
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.w1 = torch.nn.Linear(dim, hidden_dim, **options)  # gate
        self.w2 = torch.nn.Linear(hidden_dim, dim, **options)  # down
        self.w3 = torch.nn.Linear(dim, hidden_dim, **options)  # up

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., dim]`` to ``[..., dim]``."""
        w1, w2, w3, backend = self.w1, self.w2, self.w3, self.backends[self.op]
        seed = draw_seed(x) if self.dropout and self.training else None
        layers = layers_for(x, backend)
        if (both := layers.together(x, w1, w3)) is not None:
            return layers.linear(self._product(both, None, seed), w2)
        again = self.recompute if torch.is_grad_enabled() else "none"
        if again == "projections" and all(map(is_plain, (w1, w2, w3))):
            return _recomputed(partial(self._whole, layers.function), x, w1.weight, w2.weight, w3.weight, seed)
        gate, up = layers.each(x, w1, w3)
        # A frozen w2 does not save the product anyway.
        if again == "product" and is_plain(w2) and w2.weight.requires_grad:
            return _recomputed(partial(self._down, layers.function), gate, up, w2.weight, seed)
        (y,) = layers.each(self._product(gate, up, seed), w2)
        return y

    def _whole(self, linear: Linear, x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, seed: Tensor | None) -> Tensor:
        return self._down(linear, linear(x, w1), linear(x, w3), w2, seed)

    def _down(self, linear: Linear, gate: Tensor, up: Tensor, w2: Tensor, seed: Tensor | None) -> Tensor:
        return linear(self._product(gate, up, seed), w2)

    def _product(self, gate: Tensor, up: Tensor | None, seed: Tensor | None) -> Tensor:
        return self._gate(gate, up, backend=self.backends[self.op], **_dropped(self.dropout, seed))

    def extra_repr(self) -> str:
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        options = f"activation={self.activation!r}, recompute={self.recompute!r}{dropout}"
        return f"{options}, backend={describe(self.backends)}"


class MLP(torch.nn.Module):
    """``w2(activation(w1 x + b1)) + b2``: the feed-forward block of GPT-2, BLOOM and Falcon.

    The activation takes the bias of w1 in its own pass (:func:`foundry_kernels.bias_gelu`).

    Args:
        dim: width D of the input and the output.
        hidden_dim: width N between.
        activation: "gelu", "gelu_tanh" (its tanh approximation), "silu" or "relu".
        bias: whether the two projections have one.
        recompute: what the backward pass recomputes instead of saving it in the forward pass: "none" saves ``D + 2N``
            elements per token, "product" ``D + N``, and recomputes the activation, one pass over memory.
        dropout: dropout of the activated product in training, as in :class:`GatedMLP`.
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: a width below 1, a dropout outside [0, 1), an unknown `activation`, `recompute` or backend.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        recompute: str = "product",
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        _check(dim, hidden_dim, activation, ACTIVATIONS, recompute, RECOMPUTE[:2])
        self.dropout = check_dropout(dropout)
        self.activation, self.recompute = activation, recompute
        self.op, self._activate = ACTIVATIONS[activation]
        self.backends = plan(backend, (self.op,))
        options: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.w1 = torch.nn.Linear(dim, hidden_dim, **options)  # up
        self.w2 = torch.nn.Linear(hidden_dim, dim, **options)  # down

    def forward(self, x: Tensor) -> Tensor:
        """x ``[..., dim]`` to ``[..., dim]``."""
        w1, w2 = self.w1, self.w2
        layers = layers_for(x, self.backends[self.op])
        if is_linear(w1) and w1.bias is not None:  # which the activation adds
            up, bias = layers.product(x, w1.weight), w1.bias
        else:
            up, bias = layers.linear(x, w1), None
        seed = draw_seed(x) if self.dropout and self.training else None
        if self.recompute == "product" and torch.is_grad_enabled() and is_linear(w2) and w2.weight.requires_grad:
            return _recomputed(partial(self._down, layers.function), up, bias, w2.weight, w2.bias, seed)
        return layers.linear(self._activated(up, bias, seed), w2)

    def _down(
        self, linear: Linear, up: Tensor, bias: Tensor | None, w2: Tensor, bias2: Tensor | None, seed: Tensor | None
    ) -> Tensor:
        return linear(self._activated(up, bias, seed), w2, bias2)

    def _activated(self, up: Tensor, bias: Tensor | None, seed: Tensor | None) -> Tensor:
        return self._activate(up, bias, backend=self.backends[self.op], **_dropped(self.dropout, seed))

    def extra_repr(self) -> str:
        dropout = f", dropout={self.dropout}" if self.dropout else ""
        options = f"activation={self.activation!r}, recompute={self.recompute!r}{dropout}"
        return f"{options}, backend={describe(self.backends)}"


def _check(
    dim: int, hidden_dim: int, activation: str, activations: Any, recompute: str, recomputes: tuple[str, ...]
) -> None:
    for name, value in (("dim", dim), ("hidden_dim", hidden_dim)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    for name, choice, known in (("activation", activation, activations), ("recompute", recompute, recomputes)):
        if choice not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {choice!r}")


def check_dropout(dropout: float) -> float:
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1); got {dropout}")
    return dropout


def _dropped(dropout: float, seed: Tensor | None) -> dict[str, Any]:
    """Options of an activation."""
    return {} if seed is None else {"dropout_p": dropout, "dropout_seed": seed}


def _recomputed(function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
    """Computes function(*inputs) and saves only the inputs. The backward pass recomputes it up to its last matmul,
    whose result is not needed. The weights are inputs too, because the layers may hold others by then, for example
    after `torch.func.functional_call`."""
    return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
