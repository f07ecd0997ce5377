"""PyTorch's cross_entropy and linear_cross_entropy, for class indices."""

from __future__ import annotations

import dataclasses
from typing import Any, SupportsFloat, SupportsIndex

import torch
from torch import Tensor
from torch.nn import _reduction

from foundry_kernels.compat.scalars import as_float, as_int
from foundry_kernels.core.checks import check_float, check_tensor
from foundry_kernels.core.registry import wide_dtype
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
    """``torch.nn.functional.cross_entropy`` of class indices on this package's kernels.

    Args:
        input: ``[C]``, ``[N, C]`` or ``[N, C, d1, d2, ...]`` logits, the classes in dimension 1 as in PyTorch.
        target: ``[]``, ``[N]`` or ``[N, d1, d2, ...]`` int32 or int64, in 0 .. C - 1 or `ignore_index`. Probabilities
            are refused.
        weight: ``[C]``, or None.
        size_average, reduce: deprecated in PyTorch, and translated to `reduction` as there.
        ignore_index: targets that count nothing.
        reduction: "none", "mean" or "sum".
        label_smoothing: 0 .. 1.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        The loss, of input's dtype. A mean over nothing is 0, where PyTorch's is NaN.

    Raises:
        TypeError, ValueError, IndexError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.

    The kernels take the classes last: an input of more than two dimensions is copied unless its classes are already
    last in memory.
    """
    check_float("input", input)
    check_tensor("target", target)
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    tokens = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    if target.shape != tokens and not target.is_floating_point():
        raise ValueError(
            f"target must have shape {tuple(tokens)}, input's without the classes; got {tuple(target.shape)}"
        )
    return fk_cross_entropy(
        input.movedim(1, -1) if input.dim() > 2 else input,
        target,
        weight=weight,
        ignore_index=as_int("ignore_index", ignore_index),
        reduction=reduction,
        label_smoothing=as_float("label_smoothing", label_smoothing),
        backend=backend,
    ).to(input.dtype)


#: Fields of PyTorch's options that are supported.
_OPTIONS = ("allow_retain_graph", "batch_chunk_size", "chunking_method", "acc_policy", "acc_dtype")


def _chunk_size(options: Any, dtype: torch.dtype) -> int | None:
    """Returns the chunk size that PyTorch's options ask for."""
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
    """``torch.nn.functional.linear_cross_entropy`` (PyTorch 2.13) of class indices, always in chunks.

    Args:
        input: ``[in_features]`` or ``[N, in_features]``.
        linear_weight: ``[C, in_features]``. Weights of more dimensions are refused.
        target: ``[]`` or ``[N]`` int32 or int64, in 0 .. C - 1 or `ignore_index`. Probabilities are refused.
        linear_bias: ``[C]``, or None.
        weight: ``[C]``, of each class, or None.
        reduction: "none", "mean" or "sum".
        ignore_index: targets that count nothing; None is -100.
        label_smoothing: 0 .. 1.
        options: PyTorch's `LinearCrossEntropyOptions`, or None. Its `batch_chunk_size` is taken; sums are in float32
            (float64 of float64 inputs) and `retain_graph` works whatever it says.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        The loss, of input's dtype. A mean over nothing is 0, where PyTorch's is NaN.

    Raises:
        TypeError, ValueError, IndexError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.
    """
    check_float("input", input)
    check_float("linear_weight", linear_weight)
    chunk_size = _chunk_size(options, input.dtype)
    if linear_weight.dim() != 2:
        raise ValueError(f"linear_weight must be [C, in_features]; got shape {tuple(linear_weight.shape)}")
    return fk_linear_cross_entropy(
        input,
        linear_weight,
        target,
        bias=linear_bias,
        class_weight=weight,
        chunk_size=chunk_size,
        ignore_index=-100 if ignore_index is None else as_int("ignore_index", ignore_index),
        reduction=reduction,
        label_smoothing=as_float("label_smoothing", label_smoothing),
        backend=backend,
    ).to(input.dtype)
