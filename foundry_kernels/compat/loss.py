"""PyTorch's cross_entropy and linear_cross_entropy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn.functional import linear

from foundry_kernels.compat import probabilities
from foundry_kernels.compat.scalars import as_float, as_int
from foundry_kernels.core.checks import check_float, check_shape, check_tensor
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear_loss.problem import mean_of, total_weight
from foundry_kernels.ops.cross_entropy import cross_entropy as fk_cross_entropy
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy as fk_linear_cross_entropy


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: SupportsIndex = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: SupportsFloat = 0.0,
    *,
    backend: str = "auto",
) -> Tensor:
    """``torch.nn.functional.cross_entropy`` on this package's kernels.

    Args:
        input: ``[C]``, ``[N, C]`` or ``[N, C, d1, d2, ...]`` logits, the classes in dimension 1 as in PyTorch.
        target: classes, ``[]``, ``[N]`` or ``[N, d1, d2, ...]`` int32 or int64, in 0 .. C - 1 or `ignore_index`. Or
            their probabilities, floating-point and of input's shape, which get a gradient where they require one.
        weight: ``[C]``, or None. With probabilities it may require a gradient.
        size_average, reduce: deprecated in PyTorch, and translated to `reduction` as there.
        ignore_index: targets with this class are ignored. With probabilities it must be negative, and has no effect.
        reduction: "none", "mean" or "sum". As in PyTorch the mean is by weight for classes, over tokens for
            probabilities.
        label_smoothing: 0 .. 1.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        The loss, of input's dtype (with probabilities of the one that input, target and weight promote to). A mean
        over nothing is 0, where PyTorch's is NaN.

    Raises:
        TypeError, ValueError, IndexError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.

    The kernels take the classes last: an input of more than two dimensions is copied unless its classes are already
    last in memory. Probabilities have no kernel: on every backend PyTorch's operations compute the loss for a part of
    the batch at a time, without copying input, so that besides the gradients only a part needs memory (all of it on the
    reference, which has second derivatives, and before a compiler fuses it).
    """
    check_float("input", input)
    check_tensor("target", target)
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    ignored, smoothing = as_int("ignore_index", ignore_index), as_float("label_smoothing", label_smoothing)
    if target.is_floating_point():
        if ignored >= 0:
            raise ValueError(f"ignore_index must be negative where target holds probabilities; got {ignored}")
        loss = probabilities.cross_entropy(input, target, weight, reduction, smoothing, backend)
        return loss.to(_promoted(input, target, weight))
    tokens = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    if target.shape != tokens:
        raise ValueError(
            f"target must have shape {tuple(tokens)}, input's without the classes; got {tuple(target.shape)}"
        )
    return fk_cross_entropy(
        input.movedim(1, -1) if input.dim() > 2 else input,
        target,
        weight=weight,
        ignore_index=ignored,
        reduction=reduction,
        label_smoothing=smoothing,
        backend=backend,
    ).to(input.dtype)


def _promoted(input: Tensor, *others: Tensor | None) -> torch.dtype:
    dtype = input.dtype
    for other in others:
        dtype = dtype if other is None else torch.promote_types(dtype, other.dtype)
    return dtype


#: The supported fields of PyTorch's options.
_OPTIONS = ("allow_retain_graph", "batch_chunk_size", "chunking_method", "acc_policy", "acc_dtype")


def _chunk_size(options: Any, dtype: torch.dtype) -> int | None:
    """Returns the chunk size of PyTorch's options."""
    if options is None:
        return None
    if not dataclasses.is_dataclass(options) or isinstance(options, type):
        raise TypeError(f"options must be a LinearCrossEntropyOptions or None; got {type(options).__name__}")
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name not in _OPTIONS and value != field.default:
            raise ValueError(f"options must have {field.name}={field.default!r}, the rest is not known; got {value!r}")
    wide = wide_dtype(dtype)
    if (sums := getattr(options, "acc_dtype", None)) not in (None, wide):
        raise ValueError(f"options must have acc_dtype=None or {wide}; got {sums}")
    size: int | None = getattr(options, "batch_chunk_size", None)
    return size


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: SupportsIndex | None = None,
    label_smoothing: SupportsFloat = 0.0,
    options: Any = None,
    backend: str = "auto",
) -> Tensor:
    """``torch.nn.functional.linear_cross_entropy`` (PyTorch 2.13), of class indices without keeping logits.

    Args:
        input: ``[in_features]`` or ``[N, in_features]``; of classes also ``[..., in_features]``.
        linear_weight: ``[C, in_features]``; or ``[C, d1, ..., dK, in_features]`` for K more dimensions of the loss,
            with an input of two dimensions.
        target: classes, ``[]``, ``[N]`` or ``[N, d1, ..., dK]`` int32 or int64, in 0 .. C - 1 or `ignore_index`. Or
            their probabilities, floating-point, ``[C]``, ``[N, C]`` or ``[N, C, d1, ..., dK]``, which get a gradient
            where they require one.
        linear_bias: of linear_weight's shape without the last dimension, or None.
        weight: ``[C]``, of each class, or None.
        reduction: "none", "mean" or "sum".
        ignore_index: targets with this class are ignored; None is -100. Not with probabilities.
        label_smoothing: 0 .. 1.
        options: PyTorch's `LinearCrossEntropyOptions`, or None. Its `batch_chunk_size` is taken; sums are in float32
            (float64 of float64 inputs) and `retain_graph` works whatever it says.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        The loss, of input's dtype (with probabilities as of :func:`cross_entropy`). A mean over nothing is 0, where
        PyTorch's is NaN.

    Raises:
        TypeError, ValueError, IndexError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.

    For a weight with more dimensions, each position is a separate head with a chunk of logits at a time. With
    probabilities, which are as large as the logits, PyTorch computes all logits at once, and the rest is as in
    :func:`cross_entropy`.
    """
    check_float("input", input)
    check_float("linear_weight", linear_weight)
    check_tensor("target", target)
    chunk_size = _chunk_size(options, input.dtype)
    heads = tuple(linear_weight.shape[1:-1])
    # With class indices, which have no dimension of their own, more dimensions of tokens are supported than in PyTorch.
    fits = input.dim() == 2 or (not heads and (input.dim() == 1 or not target.is_floating_point()))
    if linear_weight.dim() < 2 or input.dim() == 0 or not fits:
        raise ValueError(
            "input and linear_weight must be [in_features] or [N, in_features] and [C, in_features], or "
            "[N, in_features] and [C, d1, ..., dK, in_features]; got shapes "
            f"{tuple(input.shape)} and {tuple(linear_weight.shape)}"
        )
    check_shape("linear_weight", linear_weight, (*linear_weight.shape[:-1], input.shape[-1]), "the last is input's")
    if linear_bias is not None:
        check_float("linear_bias", linear_bias)
        check_shape("linear_bias", linear_bias, tuple(linear_weight.shape[:-1]), "linear_weight's without the last")
    smoothing = as_float("label_smoothing", label_smoothing)
    n_classes = linear_weight.shape[0]
    if target.is_floating_point():
        if ignore_index is not None:
            raise ValueError(f"ignore_index must be None where target holds probabilities; got {ignore_index}")
        logits = linear(input, linear_weight.flatten(0, -2), None if linear_bias is None else linear_bias.flatten())
        logits = logits.view(*input.shape[:-1], n_classes, *heads)
        return cross_entropy(
            logits, target, weight, reduction=reduction, label_smoothing=smoothing, backend=backend
        ).to(_promoted(input, target, weight))
    check_shape("target", target, (*input.shape[:-1], *heads), "classes, one for each output")
    ignored = -100 if ignore_index is None else as_int("ignore_index", ignore_index)

    def loss(head: Tensor, bias: Tensor | None, target: Tensor, reduction: str) -> Tensor:
        return fk_linear_cross_entropy(
            input,
            head,
            target,
            bias=bias,
            class_weight=weight,
            chunk_size=chunk_size,
            ignore_index=ignored,
            reduction=reduction,
            label_smoothing=smoothing,
            backend=backend,
        )

    if not heads:
        return loss(linear_weight, linear_bias, target, reduction).to(input.dtype)
    if math.prod(heads) == 0:
        raise ValueError(f"linear_weight must have at least one output; got shape {tuple(linear_weight.shape)}")
    of_head = linear_weight.flatten(1, -2).unbind(1)
    biases = [None] * len(of_head) if linear_bias is None else linear_bias.flatten(1).unbind(1)
    each = "sum" if reduction == "mean" else reduction
    losses = [loss(*args, each) for args in zip(of_head, biases, target.flatten(1).unbind(1), strict=True)]
    if reduction == "none":
        return torch.stack(losses, 1).view(target.shape).to(input.dtype)
    total = torch.stack(losses)
    if reduction == "sum":
        return total.sum().to(input.dtype)
    return mean_of(total, total_weight(target, weight, ignored, total.dtype)).to(input.dtype)
