r"""RMSNorm times an activated gate in one kernel, forward and backward: what follows linear attention.

For a row :math:`x \in R^N`, its gate :math:`g` and the weight :math:`w`

.. math:: r = 1 / \sqrt{\tfrac1N \sum_i x_i^2 + \epsilon}, \qquad y_i = x_i \, r \, w_i \, a(g_i)

with the activation a, and, with :math:`dy_i = \partial L / \partial y_i` and :math:`v_i = dy_i \, a(g_i) \, w_i`,

.. math:: \partial L / \partial x_i = r \, v_i - x_i \, \frac{r^3}{N} \sum_j v_j x_j, \qquad
          \partial L / \partial g_i = dy_i \, x_i \, r \, w_i \, a'(g_i), \qquad
          \partial L / \partial w_i = \sum_{rows} dy_i \, a(g_i) \, x_i \, r .

The backward pass needs the inputs and r of each row. Arithmetic is in float32 (float64 for float64 inputs); results are
rounded once.
"""

from __future__ import annotations

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_float,
    check_not_negative,
    check_shape,
    constants,
    default_eps,
)
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.gated_rms_norm import reference

MAX_WIDTH = 8192
ACTIVATIONS = ("silu", "sigmoid")


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    activation: str = "silu",
    round_before_weight: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Root-mean-square normalization over the last dimension, times an activated gate.

    ``y = x / sqrt(mean(x^2, -1) + eps) * weight * activation(gate)``

    Args:
        x: ``[..., N]`` float32, bfloat16, float16 or float64, any strides. N in 1 .. 8192; other dimensions may be 0.
        gate: of x's shape, dtype and device, any strides.
        weight: ``[N]``, any of these dtypes (float64 only with a float64 x), or None for no scaling.
        eps: added to the mean square, >= 0; None as for :func:`foundry_kernels.rms_norm`.
        activation: "silu" (Qwen3-Next, Mamba-2) or "sigmoid" (Kimi Linear).
        round_before_weight: round ``x / rms`` to x's dtype before the weight multiplies, as Qwen's own code does.
        backend: "auto", "reference", "triton" or "native" (on the CPU).

    Returns:
        ``y [..., N]``, contiguous, of x's dtype.

    Raises:
        TypeError: an argument is not a tensor or has an unsupported dtype.
        ValueError: shapes, dtypes or devices do not match, `activation` is another one, or `eps` is negative.
        BackendUnavailable: the named backend does not support this device or dtype.

    Kernels have no second derivative.
    """
    check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension; got a scalar")
    if not 1 <= x.shape[-1] <= MAX_WIDTH:
        raise ValueError(f"x must have a last dimension of 1 to {MAX_WIDTH}; got shape {tuple(x.shape)}")
    check_float("gate", gate)
    check_shape("gate", gate, x.shape, "that of x")
    check_dtype("gate", gate, "x", x)
    check_device("gate", gate, "x", x)
    if weight is not None:
        check_float("weight", weight)
        check_shape("weight", weight, (x.shape[-1],), "the width of x")
        check_device("weight", weight, "x", x)
        if str(weight.dtype) == "torch.float64" != str(x.dtype):
            raise TypeError(f"weight may be float64 only where x is; got x of {x.dtype}")
    if eps is None:
        eps = default_eps("x", x)
    if is_dynamo_compiling():
        (eps,) = constants(eps)
    check_not_negative("eps", eps)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    check_bool("round_before_weight", round_before_weight)
    return resolve(GATED_RMS_NORM, backend, x)(x, gate, weight, eps, activation, round_before_weight)


GATED_RMS_NORM = register_op(gated_rms_norm, reference.gated_rms_norm, native_devices=("cpu",))
