"""RMSNorm and LayerNorm as modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_not_negative, check_number, check_tensor
from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._scripting import refuse_scripting
from foundry_kernels.ops.rms_norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm


class RMSNorm(torch.nn.RMSNorm):
    """:class:`torch.nn.RMSNorm` over this package's kernels: same arguments, attributes and state dict.

    ``y = x / sqrt(mean(x^2) + eps) * (weight + weight_offset)``, the mean over the last ``len(normalized_shape)``
    dimensions.

    Args:
        normalized_shape: int or ints, the trailing dimensions of x that are normalised together.
        eps: None means, as in torch, the machine epsilon of the arithmetic: float64's for a float64 x, else float32's.
        elementwise_affine: whether there is a weight.
        weight_offset: added to the weight (Gemma: 1.0). The weight starts at ``1 - weight_offset``.
        round_before_weight: the order of Llama's own code; see :func:`foundry_kernels.rms_norm`.
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: a zero-width or empty `normalized_shape`, a negative eps, an offset without a weight, an unknown
            backend.
    """

    __prepare_scriptable__ = refuse_scripting

    weight_offset: float = 0.0  # the base class resets the parameters before __init__ gets to set this

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        weight_offset: float = 0.0,
        round_before_weight: bool = False,
        backend: Backend = "auto",
    ) -> None:
        backends = plan(backend, ("rms_norm", "add_rms_norm"))
        if weight_offset and not elementwise_affine:
            raise ValueError(f"weight_offset needs elementwise_affine=True; got weight_offset={weight_offset}")
        check_number("weight_offset", weight_offset)
        if eps is not None:
            check_not_negative("eps", eps)
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        _check_normalized_shape(self.normalized_shape)
        self.weight_offset = weight_offset
        self.round_before_weight = round_before_weight
        self.backends = backends
        if weight_offset:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the weight so that ``weight + weight_offset`` is 1."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1.0 - self.weight_offset)

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor, residual: Tensor, *, dropout_p: float = 0.0, dropout_seed: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        dropout_p: float = 0.0,
        dropout_seed: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise `x`, or the sum of `x` and `residual`.

        Args:
            x: ``[..., *normalized_shape]``.
            residual: None, or a tensor of x's shape.
            dropout_p, dropout_seed: dropout of x before the residual is added, whether the module is in training
                or not; see :func:`foundry_kernels.add_rms_norm`.

        Returns:
            ``y`` of x's shape; with a residual ``(y, h)``, ``h = x + residual`` rounded to x's dtype and y its norm.

        Raises:
            ValueError: x does not end in `normalized_shape`, dropout without a residual, or the operation's own
                conditions.
        """
        check_tensor("x", x)
        dims, shape = len(self.normalized_shape), x.shape
        if tuple(shape[-dims:]) != self.normalized_shape:
            raise ValueError(f"x must end in normalized_shape {self.normalized_shape}; got shape {tuple(shape)}")
        weight: Tensor | None = self.weight if self.elementwise_affine else None
        if dims > 1:
            x = x.flatten(-dims)
            weight = None if weight is None else weight.flatten()
            residual = None if residual is None else residual.flatten(-dims)
        eps, offset, order = self.eps, self.weight_offset, self.round_before_weight
        if residual is None:
            _check_no_dropout(dropout_p)
            backend = self.backends["rms_norm"]
            y = rms_norm(x, weight, eps, weight_offset=offset, round_before_weight=order, backend=backend)
            return y if dims == 1 else y.view(shape)
        backend = self.backends["add_rms_norm"]
        y, h = add_rms_norm(
            x,
            residual,
            weight,
            eps,
            weight_offset=offset,
            round_before_weight=order,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            backend=backend,
        )
        return (y, h) if dims == 1 else (y.view(shape), h.view(shape))

    def extra_repr(self) -> str:
        extra = f", backend={describe(self.backends)}"
        if self.weight_offset:
            extra += f", weight_offset={self.weight_offset}"
        if self.round_before_weight:
            extra += ", round_before_weight=True"
        return super().extra_repr() + extra


# Its forward repeats that of RMSNorm: shared code would need two more function calls, 7 % of a small call's host time.
class LayerNorm(torch.nn.LayerNorm):
    """:class:`torch.nn.LayerNorm` over this package's kernels: same arguments, attributes and state dict.

    ``y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias``, mean and variance over the last
    ``len(normalized_shape)`` dimensions.

    Args:
        normalized_shape: int or ints, the trailing dimensions of x that are normalised together.
        eps: added to the variance.
        elementwise_affine: whether there is a weight.
        bias: whether there is a bias beside the weight.
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: a zero-width or empty `normalized_shape`, a negative eps, an unknown backend.
    """

    __prepare_scriptable__ = refuse_scripting

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        backend: Backend = "auto",
    ) -> None:
        backends = plan(backend, ("layer_norm", "add_layer_norm"))
        check_not_negative("eps", eps)
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        _check_normalized_shape(self.normalized_shape)
        self.backends = backends

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(
        self, x: Tensor, residual: Tensor, *, dropout_p: float = 0.0, dropout_seed: Tensor | int | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        *,
        dropout_p: float = 0.0,
        dropout_seed: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Normalise `x`, or the sum of `x` and `residual`.

        Args:
            x: ``[..., *normalized_shape]``.
            residual: None, or a tensor of x's shape.
            dropout_p, dropout_seed: dropout of x before the residual is added, whether the module is in training
                or not; see :func:`foundry_kernels.add_layer_norm`.

        Returns:
            ``y`` of x's shape; with a residual ``(y, h)``, ``h = x + residual`` rounded to x's dtype and y its norm.

        Raises:
            ValueError: x does not end in `normalized_shape`, dropout without a residual, or the operation's own
                conditions.
        """
        check_tensor("x", x)
        dims, shape = len(self.normalized_shape), x.shape
        if tuple(shape[-dims:]) != self.normalized_shape:
            raise ValueError(f"x must end in normalized_shape {self.normalized_shape}; got shape {tuple(shape)}")
        weight: Tensor | None = self.weight
        bias: Tensor | None = self.bias
        if dims > 1:
            x = x.flatten(-dims)
            weight, bias = (None if v is None else v.flatten() for v in (weight, bias))
            residual = None if residual is None else residual.flatten(-dims)
        if residual is None:
            _check_no_dropout(dropout_p)
            y = layer_norm(x, weight, bias, self.eps, backend=self.backends["layer_norm"])
            return y if dims == 1 else y.view(shape)
        backend = self.backends["add_layer_norm"]
        y, h = add_layer_norm(
            x, residual, weight, bias, self.eps, dropout_p=dropout_p, dropout_seed=dropout_seed, backend=backend
        )
        return (y, h) if dims == 1 else (y.view(shape), h.view(shape))

    def extra_repr(self) -> str:
        return super().extra_repr() + f", backend={describe(self.backends)}"


def _check_normalized_shape(normalized_shape: tuple[int, ...]) -> None:
    if not normalized_shape or min(normalized_shape) < 1:
        raise ValueError(f"normalized_shape must hold sizes of at least 1; got {normalized_shape}")


def _check_no_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ValueError(f"dropout_p needs a residual that x is added to; got dropout_p={dropout_p}, residual=None")
