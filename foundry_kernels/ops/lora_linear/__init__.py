r"""Linear layers with low-rank adapters (LoRA): a frozen matrix plus a trainable product of two thin ones.

.. math:: y = x W^T + b + s \, (d(x) A^T) B^T

with A [r, K], B [M, r], a scale s and dropout d, whose mask is a function of a seed (`foundry_kernels.core.dropout`).
With :math:`t = d(x) A^T` and :math:`dt = s \, dy B`

.. math:: dx = dy \, W + d'(dt \, A), \quad dA = dt^T d(x), \quad dB = s \, dy^T t

where d' multiplies by the mask of d. x and t, which is r wide, are all that is saved for the backward pass. The result
of the frozen layer and its part of the gradient of x are rounded to x's dtype as PyTorch's matmuls round them; the
rest is in float32 and added before the one other rounding.

Layers that read the same x share t, computed with the A's stacked, and have one gradient of x.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import dropout, invariance
from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.checks import (
    check_device,
    check_dtype,
    check_float,
    check_number,
    check_rank,
    check_shape,
    constants,
)
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.lora_linear import reference


def lora_linear(
    x: Tensor,
    weight: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    base: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """``x W^T + bias + scale * (dropout(x) A^T) B^T``, a linear layer with a LoRA adapter.

    Args:
        x: ``[..., K]`` float32, bfloat16, float16 or float64, any strides, at least one dimension; any may be 0.
        weight: ``[M, K]``, of x's dtype and device; None with `base`. If it requires a gradient it gets one.
        lora_a: ``[r, K]``, of x's dtype or float32, r at least 1. lora_b: ``[M, r]``, as `lora_a`.
        bias: ``[M]``, of x's dtype, or None.
        scale: what the adapter's product is multiplied by, a finite number.
        dropout_p, dropout_seed: dropout of the adapter's x, as in :func:`foundry_kernels.swiglu`.
        base: ``[..., M]``, of x's dtype: what a layer of any kind, quantised for example, made of x, in place of
            `weight` and `bias`. It is not overwritten. Its own backward pass adds to the gradient of x.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``[..., M]``, contiguous, of x's dtype.

    Raises:
        TypeError: an argument is not a tensor or not floating-point, such as an integer weight without `base`.
        ValueError: shapes, dtypes or devices do not match; the ranks differ or are 0; `scale` is not finite; both or
            neither of `weight` and `base` are given; dropout is out of range; the backend is unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Under autocast x, weight and bias are first cast to its dtype, or x to that of `base`; adapters are not. The
    adapter's arithmetic is in float32 (float64 for float64 inputs). Its gradients are summed in float32 and have its
    dtype. Only x and ``x A^T`` are saved for the backward pass. Kernels have no second derivative.
    As in `F.linear`, a DTensor x of three or more dimensions must be sharded evenly along its rows.
    """
    names = ("weight", "lora_a", "lora_b", "bias", "base", "scale")
    layer = (weight, lora_a, lora_b, bias, base, scale)
    return _call(x, [layer], [names], dropout_p, dropout_seed, backend)[0]


def lora_linears(
    x: Tensor,
    weights: Sequence[Tensor | None],
    lora_as: Sequence[Tensor],
    lora_bs: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    scales: Sequence[float] | float = 1.0,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    bases: Sequence[Tensor | None] | None = None,
    backend: str = "auto",
) -> tuple[Tensor, ...]:
    """:func:`lora_linear` of several layers that read the same x, such as q, k and v, or gate and up: one matmul with
    the A's stacked, and one gradient of x.

    Args:
        x, dropout_p, dropout_seed, backend: as for :func:`lora_linear`. The layers share one mask of dropout.
        weights, lora_as, lora_bs, biases, bases: what each layer has, as for :func:`lora_linear`; M and r may differ
            between layers. None for `biases` or `bases` if no layer has one.
        scales: of each layer, or one of all.

    Returns:
        ``[..., M]`` of each layer.

    Raises:
        TypeError, ValueError: as for :func:`lora_linear`, where ``lora_as[i]`` names an argument of layer i; the lists
            are empty or of different lengths.
    """
    n = len(lora_as)
    given = {
        "weights": weights,
        "lora_as": lora_as,
        "lora_bs": lora_bs,
        "biases": [None] * n if biases is None else biases,
        "bases": [None] * n if bases is None else bases,
        "scales": [scales] * n if isinstance(scales, (float, int, torch.SymFloat)) else scales,
    }
    if n == 0:
        raise ValueError("lora_as must have an adapter of at least one layer; got none")
    for name, each in given.items():
        if len(each) != n:
            raise ValueError(f"{name} must have one entry for each of the {n} of lora_as; got {len(each)}")
    layers = list(zip(*given.values(), strict=True))
    names = [tuple([f"{name}[{i}]" for name in given]) for i in range(n)]
    return tuple(_call(x, layers, names, dropout_p, dropout_seed, backend))


def _call(
    x: Tensor,
    layers: list[tuple[Any, ...]],
    names: Sequence[tuple[str, ...]],
    dropout_p: float,
    dropout_seed: Tensor | int | None,
    backend: str,
) -> Sequence[Tensor]:
    """A direct call serves plain tensors, of whose Python only that for other ones is here."""
    if is_dynamo_compiling():  # before a comparison, which would be of a symbol
        (dropout_p,) = constants(dropout_p)
        layers = [(*tensors, *constants(scale)) for *tensors, scale in layers]
    plain = not is_dynamo_compiling() and not invariance.on
    drops = dropout_p != 0.0 or dropout_seed is not None
    if plain and not drops and (found := LORA_LINEAR.direct(backend, x, layers, 0.0, None)) is not None:
        return found
    check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension; got a scalar")
    if (low := autocast_dtype(x)) is not None:
        base = next((base for *_, base, _ in layers if base is not None), None)
        low = low if base is None else base.dtype
        x = x.to(low)
        layers = [(_as(low, weight), a, b, _as(low, bias), base, scale) for weight, a, b, bias, base, scale in layers]
    for i, layer in enumerate(layers):
        _check(x, *layer, *names[i])
    drop: tuple[float, Tensor | None] = (0.0, None)
    if drops:
        drop = dropout.arguments(x, dropout_p, dropout_seed) or drop
        if plain and (found := LORA_LINEAR.direct(backend, x, layers, *drop)) is not None:
            return found
    weights, a, b, biases, bases, scales = zip(*layers, strict=True)
    return resolve(LORA_LINEAR, backend, x)(x, weights, a, b, biases, bases, scales, *drop)


def _as(dtype: torch.dtype, x: Tensor | None) -> Tensor | None:
    return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x


def _check(
    x: Tensor, weight: Tensor | None, a: Tensor, b: Tensor, bias: Tensor | None, base: Tensor | None, scale: float,
    weight_: str, a_: str, b_: str, bias_: str, base_: str, scale_: str,
) -> None:  # fmt: skip
    """Checks one layer; the arguments with an underscore are the names of the others."""
    width = x.shape[-1]
    for name, adapter, layout in ((a_, a, "[r, K]"), (b_, b, "[M, r]")):
        check_float(name, adapter)
        check_rank(name, adapter, 2, layout)
        check_device(name, adapter, "x", x)
        if adapter.dtype not in (x.dtype, torch.float32):
            raise ValueError(f"{name} must have x's dtype {x.dtype} or float32; got {adapter.dtype}")
    rank = a.shape[0]
    if rank == 0:
        raise ValueError(f"{a_} must be [r, K] with a rank r of at least 1; got shape {tuple(a.shape)}")
    check_shape(a_, a, (rank, width), "[r, K], K the width of x")
    check_shape(b_, b, (b.shape[0], rank), f"[M, r], r the rank of {a_}")
    if (base is None) == (weight is None):
        raise ValueError(f"one of {weight_} and {base_} must be given; got {'neither' if base is None else 'both'}")
    if weight is not None:
        if isinstance(weight, Tensor) and not weight.is_floating_point():
            raise TypeError(f"{weight_} must be floating-point; got {weight.dtype}: give the layer's output as {base_}")
        check_float(weight_, weight)
        check_shape(weight_, weight, (b.shape[0], width), f"[M, K], M of {b_} and K the width of x")
        check_dtype(weight_, weight, "x", x)
        check_device(weight_, weight, "x", x)
    if bias is not None:
        if base is not None:
            raise ValueError(f"{bias_} must be None where {base_}, the layer's output, is given")
        check_float(bias_, bias)
        check_shape(bias_, bias, (b.shape[0],), f"M of {b_}")
        check_dtype(bias_, bias, "x", x)
        check_device(bias_, bias, "x", x)
    if base is not None:
        check_float(base_, base)
        check_shape(base_, base, (*x.shape[:-1], b.shape[0]), f"[..., M], x's other dimensions and M of {b_}")
        check_dtype(base_, base, "x", x)
        check_device(base_, base, "x", x)
    check_number(scale_, scale)


LORA_LINEAR = register_op(lora_linear, reference.lora_linear, native_devices=("cpu",))
