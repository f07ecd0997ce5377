"""PyTorch's rms_norm and layer_norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, SupportsFloat

from torch import Tensor

from foundry_kernels.compat.scalars import as_float
from foundry_kernels.core.checks import check_float, check_tensor
from foundry_kernels.core.registry import BackendUnavailable, check_backend
from foundry_kernels.ops.rms_norm import layer_norm as fk_layer_norm
from foundry_kernels.ops.rms_norm import reference
from foundry_kernels.ops.rms_norm import rms_norm as fk_rms_norm


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: SupportsFloat | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """``torch.nn.functional.rms_norm`` on this package's kernels.

    Args:
        input: ``[..., *normalized_shape]``.
        normalized_shape: the trailing dimensions that are normalised together.
        weight: ``[*normalized_shape]``, or None.
        eps: added to the mean square. None is, as in PyTorch, the machine epsilon of the arithmetic: float64's for
            float64, else float32's. A negative one is computed by the reference.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        A contiguous tensor of input's shape and dtype. Autocast has no effect on it.

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype, or `eps` is negative.
    """
    flat, scale = _rows(input, normalized_shape, weight=weight)
    number = None if eps is None else as_float("eps", eps)
    if number is not None and number < 0.0:
        _refuse_kernels("rms_norm", input, backend, number)
        return reference.rms_norm(flat, scale, number, 0.0, False).view(input.shape)
    return fk_rms_norm(flat, scale, number, backend=backend).view(input.shape)


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: SupportsFloat = 1e-5,
    *,
    backend: str = "auto",
) -> Tensor:
    """``torch.nn.functional.layer_norm`` on this package's kernels.

    Args:
        input: ``[..., *normalized_shape]``.
        normalized_shape: the trailing dimensions that are normalised together.
        weight, bias: ``[*normalized_shape]``, or None.
        eps: added to the variance. A negative one is computed by the reference.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        A contiguous tensor of input's shape and dtype. Autocast has no effect on it.

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype, or `eps` is negative.
    """
    flat, scale, offset = _rows(input, normalized_shape, weight=weight, bias=bias)
    number = as_float("eps", eps)
    if number < 0.0:
        _refuse_kernels("layer_norm", input, backend, number)
        return reference.layer_norm(flat, scale, offset, number).view(input.shape)
    return fk_layer_norm(flat, scale, offset, number, backend=backend).view(input.shape)


def _rows(input: Tensor, normalized_shape: Sequence[int], **vectors: Tensor | None) -> tuple[Any, ...]:
    """`input` and the vectors, checked, with the normalised dimensions as one."""
    check_tensor("input", input)
    shape = tuple(normalized_shape)
    dims = len(shape)
    if dims == 0 or tuple(input.shape[-dims:]) != shape:
        raise ValueError(f"input must end in normalized_shape {shape}; got shape {tuple(input.shape)}")
    for name, vector in vectors.items():
        if vector is not None:
            check_tensor(name, vector)
            if tuple(vector.shape) != shape:
                raise ValueError(f"{name} must have shape {shape}, normalized_shape; got {tuple(vector.shape)}")
    return input.flatten(-dims), *(None if v is None else v.reshape(-1) for v in vectors.values())


def _refuse_kernels(op: str, input: Tensor, backend: str, eps: float) -> None:
    check_float("input", input)
    check_backend(backend)
    if backend in ("triton", "native"):
        raise BackendUnavailable(f"{op}: backend {backend!r} takes no negative eps; got {eps}")
