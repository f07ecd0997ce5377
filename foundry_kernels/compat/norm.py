"""PyTorch's layer_norm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsFloat

from torch import Tensor

from foundry_kernels.compat.scalars import as_float
from foundry_kernels.core.checks import check_tensor
from foundry_kernels.ops.rms_norm import layer_norm as fk_layer_norm


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
        eps: added to the variance, >= 0.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        A contiguous tensor of input's shape and dtype. Autocast has no effect on it.

    Raises:
        TypeError, ValueError: an argument does not fit.
        BackendUnavailable: the named backend does not support this device or dtype.
    """
    check_tensor("input", input)
    shape = tuple(normalized_shape)
    dims = len(shape)
    if dims == 0 or tuple(input.shape[-dims:]) != shape:
        raise ValueError(f"input must end in normalized_shape {shape}; got shape {tuple(input.shape)}")
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is not None and tuple(vector.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, normalized_shape; got {tuple(vector.shape)}")
    flat, of_all = (None if v is None else v.reshape(-1) for v in (weight, bias))
    y = fk_layer_norm(input.flatten(-dims), flat, of_all, as_float("eps", eps), backend=backend)
    return y.view(input.shape)
