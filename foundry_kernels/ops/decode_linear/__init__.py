r"""Multiplies few rows by the transposes of several weights in one pass over the weights: the projections of a decoding
step.

With the weights :math:`W_1, \dots, W_m` of linear layers that read the same x

.. math:: y = x \, [W_1; \dots; W_m]^T

so y is the concatenation of the layers' results along the last dimension. Sums are in float32 and are rounded once.
Each weight is read in place: nothing is packed, copied or cached between calls. There is no gradient.
"""

from __future__ import annotations

import math

from torch import Tensor

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.checks import check_device, check_dtype, check_float, check_rank
from foundry_kernels.core.inference import cut, without_backward
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.decode_linear import reference

#: The largest number of rows for which one pass over the weights is faster than torch's matmuls; the operator supports
#: no more.
MAX_ROWS = 8


def decode_linear(
    x: Tensor,
    weight: Tensor,
    weight2: Tensor | None = None,
    weight3: Tensor | None = None,
    weight4: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """``torch.cat([F.linear(x, w) for w in weights], -1)`` of a few rows, without gradients.

    Args:
        x: ``[..., K]`` float32, bfloat16, float16 or float64, any strides, at most 8 rows.
        weight, weight2, weight3, weight4: ``[N, K]`` with an N of their own, of x's dtype and device, any strides; None
            for one that is absent.
        backend: "auto", "reference" or "native".

    Returns:
        ``[..., sum of N]``, contiguous, of x's dtype. A row has the same bits in any batch.

    Raises:
        TypeError: an argument is not a tensor or not floating-point.
        ValueError: shapes, dtypes or devices do not match, x has more than 8 rows, or the backend is unknown.
        RuntimeError: a backward pass reaches the result, which has no gradient.
        BackendUnavailable: the named backend does not support this device or dtype.

    Under autocast x and the weights are first cast to its dtype, as in a linear layer.
    """
    check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension; got shape ()")
    if math.prod(x.shape[:-1]) > MAX_ROWS:
        raise ValueError(f"x must have at most {MAX_ROWS} rows; got shape {tuple(x.shape)}")
    weights: list[Tensor] = []
    for name, each in (("weight", weight), ("weight2", weight2), ("weight3", weight3), ("weight4", weight4)):
        if each is None and name != "weight":
            continue
        check_float(name, each)  # type: ignore[arg-type]  # None is refused there
        assert each is not None
        check_rank(name, each, 2, "[N, K]")
        if each.shape[1] != x.shape[-1]:
            raise ValueError(f"{name} must be [N, K] with x's last dimension {x.shape[-1]}; got {tuple(each.shape)}")
        check_dtype(name, each, "x", x)
        check_device(name, each, "x", x)
        weights.append(each)
    wanted, (x, *weights) = cut(x, *weights)
    if (low := autocast_dtype(x)) is not None:
        x, weights = x.to(low), [w.to(low) for w in weights]
    y = resolve(DECODE_LINEAR, backend, x)(x, weights)
    return without_backward((y,), wanted, "decode_linear has no gradient; use torch.no_grad()")[0] if wanted else y


DECODE_LINEAR = register_op(decode_linear, reference.decode_linear, native_devices=("cpu",))
