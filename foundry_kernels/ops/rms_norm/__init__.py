r"""RMSNorm and LayerNorm, and those of a residual sum.

For a row :math:`x \in R^N` with weight :math:`w` and offset :math:`o`

.. math:: r = 1 / \sqrt{\tfrac1N \sum_i x_i^2 + \epsilon}, \qquad y_i = x_i \, r \, (w_i + o)

and, with :math:`dy_i = \partial L / \partial y_i` and :math:`v_i = dy_i (w_i + o)`,

.. math:: \partial L / \partial x_i = r \, v_i - x_i \, \frac{r^3}{N} \sum_j v_j x_j, \qquad
          \partial L / \partial w_i = \sum_{rows} dy_i \, x_i \, r .

LayerNorm subtracts the row's mean :math:`m` first and adds a bias :math:`b`: with :math:`n_i = (x_i - m) \, r`

.. math:: r = 1 / \sqrt{\tfrac1N \sum_i (x_i - m)^2 + \epsilon}, \qquad y_i = n_i w_i + b_i, \qquad
          \partial L / \partial x_i = r \Bigl(v_i - \tfrac1N \sum_j v_j - n_i \tfrac1N \sum_j v_j n_j\Bigr), \quad
          \partial L / \partial w_i = \sum_{rows} dy_i \, n_i, \quad \partial L / \partial b_i = \sum_{rows} dy_i .

The backward pass needs the input and :math:`r` (`rstd`) of each row, LayerNorm :math:`m` (`mean`) too; they are saved
only if a gradient is needed. The variance is summed around the mean, never as a difference of squares. Arithmetic is in
float32 (float64 for float64 inputs); results are rounded once.

Dropout of a residual sum, :math:`h = residual + x \odot k / (1 - p)` with a mask :math:`k` of zeros and ones, is in the
same pass. The mask is a function of a seed (`foundry_kernels.core.dropout`), and the backward pass makes it again:
:math:`\partial L / \partial x = \partial L / \partial h \odot k / (1 - p)`.

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, arXiv:1910.07467; Ba, Kiros and Hinton, "Layer
Normalization", 2016, arXiv:1607.06450.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import dropout
from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_float,
    check_not_negative,
    check_number,
    check_shape,
    constants,
    default_eps,
)
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.rms_norm import reference


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Root-mean-square normalization over the last dimension, or the last few.

    ``y = x / sqrt(mean(x^2, -1) + eps) * (weight + weight_offset)``

    Args:
        x: ``[..., N]`` float32, bfloat16, float16 or float64, any strides. N >= 1; other dimensions may be 0.
        weight: ``[N]``, any of these dtypes (float64 only with a float64 x), or None for no scaling. Of a weight of
            several dimensions, those are the last of x, and the mean is over all of them.
        eps: added to the mean square, >= 0. None is, as in ``F.rms_norm``, the machine epsilon of the arithmetic:
            float64's for a float64 x, else float32's.
        normalized_shape: the last dimensions of x that the mean is over, as in PyTorch, and the shape of the weight;
            None: the weight's shape, or without one the last dimension.
        weight_offset: added to the weight: 1.0 for Gemma, whose weights are stored around 0. Without a weight it has no
            effect.
        round_before_weight: False rounds once, after the weight (as ``F.rms_norm``, OLMo2, Gemma). True rounds
            ``x / rms`` to ``x.dtype`` before it is multiplied (as Llama, Mistral, Qwen); the result then has the dtype
            that ``x`` and ``weight`` promote to.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``y [..., N]``, contiguous, of ``x.dtype`` (but see `round_before_weight`).

    Raises:
        TypeError: an argument is not a tensor or does not have a floating-point dtype.
        ValueError: `x` is a scalar or N is 0, `weight` or `normalized_shape` does not match it, `weight` is on another
            device, `eps` is negative, or the backend is unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast has no effect: arithmetic is in float32 anyway. Kernels have no second derivative.
    """
    if eps is None:
        eps = default_eps("x", x)
    if is_dynamo_compiling():
        eps, weight_offset = constants(eps, weight_offset)
    elif normalized_shape is None:
        y = RMS_NORM.direct(backend, x, weight, eps, weight_offset, round_before_weight)
        if y is not None:
            return y
    shape = _several_dims(weight, normalized_shape)
    if shape is not None:
        rows, weight = _rows(x, weight, shape)
        options: dict[str, Any] = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
        return rms_norm(rows, weight, eps, **options, backend=backend).view(x.shape)
    _check(x, weight, eps, weight_offset, round_before_weight)
    if weight is None:
        weight_offset = 0.0
    return resolve(RMS_NORM, backend, x)(x, weight, eps, weight_offset, round_before_weight)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    normalized_shape: Sequence[int] | None = None,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The residual sum and its RMSNorm in one pass: ``h = dropout(x) + residual``, ``y = rms_norm(h)``.

    Args:
        x: ``[..., N]``, as for :func:`rms_norm`.
        residual: ``[..., N]``, of x's shape and device. If its dtype differs, the sum is formed in the dtype that both
            promote to and then rounded to ``x.dtype``.
        weight, eps, normalized_shape, weight_offset, round_before_weight, backend: as for :func:`rms_norm`.
        dropout_p: in [0, 1). Each element of x is set to 0 with this probability and is otherwise divided by ``1 -
            dropout_p``. Pass 0 in evaluation.
        dropout_seed: an int in [0, 2^63), or an int64 tensor of one number on x's device. It determines which elements
            are dropped: equal seeds drop the same elements of tensors with the same width on every backend and device.
            None draws a seed from the default generator of x's device, like `F.dropout`: `torch.manual_seed` and
            activation checkpointing reproduce it, and each replay of a CUDA graph draws a new one.

    Returns:
        ``(y, h)``, both ``[..., N]`` and contiguous. ``h`` is the sum rounded to ``x.dtype``, the next residual; ``y``
        is ``rms_norm(h)``.

    Raises:
        As :func:`rms_norm`; ValueError if `residual` does not match `x`, `dropout_p` or `dropout_seed` is out of range
            or the seed is on another device; TypeError if they have another type.
    """
    if eps is None:
        eps = default_eps("x", x)
    if is_dynamo_compiling():
        eps, weight_offset = constants(eps, weight_offset)
    elif dropout_p == 0.0 and dropout_seed is None and normalized_shape is None:
        pair = ADD_RMS_NORM.direct(backend, x, residual, weight, eps, weight_offset, round_before_weight)
        if pair is not None:
            return pair
    shape = _several_dims(weight, normalized_shape)
    if shape is not None:
        rows, weight = _rows(x, weight, shape)
        _check_residual(x, residual)
        options: dict[str, Any] = {"weight_offset": weight_offset, "round_before_weight": round_before_weight}
        options |= {"dropout_p": dropout_p, "dropout_seed": dropout_seed, "backend": backend}
        y, h = add_rms_norm(rows, residual.flatten(-len(shape)), weight, eps, **options)
        return y.view(x.shape), h.view(x.shape)
    _check(x, weight, eps, weight_offset, round_before_weight)
    if weight is None:
        weight_offset = 0.0
    _check_residual(x, residual)
    drop = dropout.arguments(x, dropout_p, dropout_seed)
    if residual.dtype != x.dtype:
        h = _sum_in_wider(x, residual, backend, drop)
        return resolve(RMS_NORM, backend, x)(h, weight, eps, weight_offset, round_before_weight), h
    return resolve(ADD_RMS_NORM, backend, x)(x, residual, weight, eps, weight_offset, round_before_weight, *drop)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str = "auto",
) -> Tensor:
    """Layer normalization over the last dimension.

    ``y = (x - mean(x, -1)) / sqrt(var(x, -1) + eps) * weight + bias``, with the variance of the row itself (divided by
    N, not by N - 1).

    Args:
        x: ``[..., N]`` float32, bfloat16, float16 or float64, any strides. N >= 1; other dimensions may be 0.
        weight: ``[N]``, any of these dtypes (float64 only with a float64 x), or None for no scaling.
        bias: ``[N]``, likewise, or None; with or without a weight.
        eps: added to the variance, >= 0.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``y [..., N]``, contiguous, of ``x.dtype``.

    Raises:
        TypeError: an argument is not a tensor or does not have a floating-point dtype.
        ValueError: `x` is a scalar or N is 0, `weight` or `bias` does not match it or is on another device, `eps` is
            negative, or the backend is unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast has no effect: arithmetic is in float32 anyway. Kernels have no second derivative.
    """
    if is_dynamo_compiling():
        (eps,) = constants(eps)
    elif (y := LAYER_NORM.direct(backend, x, weight, bias, eps)) is not None:
        return y
    _check_layer_norm(x, weight, bias, eps)
    return resolve(LAYER_NORM, backend, x)(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """The residual sum and its LayerNorm in one pass: ``h = dropout(x) + residual``, ``y = layer_norm(h)``.

    Args:
        x: ``[..., N]``, as for :func:`layer_norm`.
        residual: ``[..., N]``, as for :func:`add_rms_norm`.
        weight, bias, eps, backend: as for :func:`layer_norm`.
        dropout_p, dropout_seed: as for :func:`add_rms_norm`.

    Returns:
        ``(y, h)``, both ``[..., N]`` and contiguous. ``h`` is the sum rounded to ``x.dtype``, the next residual; ``y``
        is ``layer_norm(h)``.

    Raises:
        As :func:`layer_norm`, and as :func:`add_rms_norm` for `residual`, `dropout_p` and `dropout_seed`.
    """
    if is_dynamo_compiling():
        (eps,) = constants(eps)
    elif dropout_p == 0.0 and dropout_seed is None:
        pair = ADD_LAYER_NORM.direct(backend, x, residual, weight, bias, eps)
        if pair is not None:
            return pair
    _check_layer_norm(x, weight, bias, eps)
    _check_residual(x, residual)
    drop = dropout.arguments(x, dropout_p, dropout_seed)
    if residual.dtype != x.dtype:
        h = _sum_in_wider(x, residual, backend, drop)
        return resolve(LAYER_NORM, backend, x)(h, weight, bias, eps), h
    return resolve(ADD_LAYER_NORM, backend, x)(x, residual, weight, bias, eps, *drop)


def _sum_in_wider(x: Tensor, residual: Tensor, backend: str, drop: tuple[()] | tuple[float, Tensor]) -> Tensor:
    """The sum of tensors with different dtypes, rounded to x's dtype. A kernel computes the mask and its norm is not
    used, because plain PyTorch would need a hundred passes."""
    if not drop:
        return (x + residual).to(x.dtype)
    wide = torch.promote_types(x.dtype, residual.dtype)
    add = reference.add_rms_norm if wide == torch.float64 else resolve(ADD_RMS_NORM, backend, x)
    h: Tensor = add(x.to(wide), residual.to(wide), None, 1.0, 0.0, False, *drop)[1]
    return h.to(x.dtype)


def _check(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_weight: bool) -> None:
    _check_rows(x)
    if weight is not None:  # before the numbers: a caller who begins as F.rms_norm does gave normalized_shape here
        _check_vector("weight", weight, x)
    check_not_negative("eps", eps)
    check_number("weight_offset", weight_offset)
    if round_before_weight is not True and round_before_weight is not False:  # spares every other call a call
        check_bool("round_before_weight", round_before_weight)


def _several_dims(weight: Tensor | None, normalized_shape: Sequence[int] | None) -> tuple[int, ...] | None:
    """The dimensions that are normalised together, if there are several or the caller names them."""
    if normalized_shape is not None:
        return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    return tuple(weight.shape) if isinstance(weight, Tensor) and weight.dim() > 1 else None


def _rows(x: Tensor, weight: Tensor | None, shape: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
    """x ``[..., *shape]`` and the weight with these dimensions as one."""
    check_float("x", x)
    if not shape or tuple(x.shape[-len(shape) :]) != shape:
        raise ValueError(f"x must end in normalized_shape {shape}; got shape {tuple(x.shape)}")
    if weight is not None:
        check_float("weight", weight)
        check_shape("weight", weight, shape, "normalized_shape")
        weight = weight.flatten()
    return x.flatten(-len(shape)), weight


def _check_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    _check_rows(x)
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None:
            _check_vector(name, vector, x)
    check_not_negative("eps", eps)


def _check_rows(x: Tensor) -> None:
    check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension; got a scalar")
    if x.shape[-1] == 0:
        raise ValueError(f"x must have a last dimension of at least 1; got shape {tuple(x.shape)}")


def _check_vector(name: str, vector: Tensor, x: Tensor) -> None:
    check_float(name, vector)
    check_shape(name, vector, (x.shape[-1],), "the width of x")
    check_device(name, vector, "x", x)
    if vector.dtype == torch.float64 != x.dtype:
        raise TypeError(f"{name} may be float64 only where x is; got x of {x.dtype}")


def _check_residual(x: Tensor, residual: Tensor) -> None:
    check_float("residual", residual)
    check_shape("residual", residual, x.shape, "that of x")
    check_device("residual", residual, "x", x)


RMS_NORM = register_op(rms_norm, reference.rms_norm)
ADD_RMS_NORM = register_op(add_rms_norm, reference.add_rms_norm)
LAYER_NORM = register_op(layer_norm, reference.layer_norm)
ADD_LAYER_NORM = register_op(add_layer_norm, reference.add_layer_norm)
