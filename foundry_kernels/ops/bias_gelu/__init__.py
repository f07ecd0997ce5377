r"""GELU, SiLU and ReLU of a sum with a bias: the middle of a feed-forward layer without a gate, as GPT-2 has it.

With the normal distribution's :math:`\Phi` and density :math:`\varphi`, :math:`z = x + b`

.. math:: y = a(z), \quad a(z) = z \, \Phi(z), \quad a'(z) = \Phi(z) + z \, \varphi(z)

and in the "tanh" form :math:`a(z) = \tfrac12 z (1 + \tanh(\sqrt{2/\pi} (z + 0.044715 z^3)))`. In SiLU
:math:`a(z) = z \, \sigma(z)` with the logistic function, in ReLU :math:`a(z) = \max(z, 0)`, with a slope of 0 at 0. The
gradient of x is :math:`dy \, a'(z)`, that of the bias its sum over the rows, so the backward pass needs only the
inputs. Arithmetic is in float32 (float64 for float64 inputs), the sum z included; results are rounded once.

Dropout, :math:`y \odot k / (1 - p)` with a mask :math:`k` of zeros and ones, is in the same pass, before the result is
rounded. The mask is a function of a seed (`foundry_kernels.core.dropout`), and the backward pass makes it again.

Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, arXiv:1606.08415.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import dropout
from foundry_kernels.core.checks import check_device, check_float, check_shape
from foundry_kernels.core.registry import OpSpec, resolve
from foundry_kernels.ops._register import NATIVE_FIRST, register_op
from foundry_kernels.ops.bias_gelu import reference

APPROXIMATIONS = ("none", "tanh")


def bias_gelu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    approximate: str = "none",
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``gelu(x + bias)``.

    Args:
        x: ``[..., N]`` float32, bfloat16, float16 or float64, any strides, at least one dimension; any of them may be
            0.
        bias: ``[N]``, any of these dtypes (float64 only with a float64 x), or None for ``gelu(x)``.
        approximate: "none" for ``gelu(z) = z * Phi(z)`` with the error function (BERT, Falcon), "tanh" for the tanh
            approximation (GPT-2, BLOOM).
        dropout_p, dropout_seed: dropout of the result, as in :func:`foundry_kernels.swiglu`.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``[..., N]``, contiguous, of x's dtype.

    Raises:
        TypeError: an argument is not a tensor or does not have a floating-point dtype; `dropout_p` or `dropout_seed`
            has another type.
        ValueError: `x` is a scalar; `bias` does not match `x`; `approximate` is unknown; `dropout_p` or `dropout_seed`
            is out of range or the seed on another device; the backend is unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast has no effect: arithmetic is in float32 anyway. Only the inputs are saved for backward. Kernels have no
    second derivative.
    """
    if not is_dynamo_compiling() and dropout_p == 0.0 and dropout_seed is None:
        y = BIAS_GELU.direct(backend, x, bias, approximate)
        if y is not None:
            return y
    _check(x, bias)
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"approximate must be one of {', '.join(APPROXIMATIONS)}; got {approximate!r}")
    drop = dropout.arguments(x, dropout_p, dropout_seed)
    return resolve(BIAS_GELU, backend, x)(x, bias, approximate, *drop)


def bias_silu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``silu(x + bias)``, with ``silu(z) = z / (1 + exp(-z))``.

    Args:
        x, bias, dropout_p, dropout_seed, backend: as for :func:`bias_gelu`.

    Returns:
        ``[..., N]``, contiguous, of x's dtype.

    Raises:
        As :func:`bias_gelu`.
    """
    if not is_dynamo_compiling() and dropout_p == 0.0 and dropout_seed is None:
        y = BIAS_SILU.direct(backend, x, bias)
        if y is not None:
            return y
    return _call(BIAS_SILU, x, bias, dropout_p, dropout_seed, backend)


def bias_relu(
    x: Tensor,
    bias: Tensor | None = None,
    *,
    dropout_p: float = 0.0,
    dropout_seed: Tensor | int | None = None,
    backend: str = "auto",
) -> Tensor:
    """``relu(x + bias)``; the gradient at 0 is 0.

    Args:
        x, bias, dropout_p, dropout_seed, backend: as for :func:`bias_gelu`.

    Returns:
        ``[..., N]``, contiguous, of x's dtype.

    Raises:
        As :func:`bias_gelu`.
    """
    if not is_dynamo_compiling() and dropout_p == 0.0 and dropout_seed is None:
        y = BIAS_RELU.direct(backend, x, bias)
        if y is not None:
            return y
    return _call(BIAS_RELU, x, bias, dropout_p, dropout_seed, backend)


def _call(
    op: OpSpec, x: Tensor, bias: Tensor | None, dropout_p: float, dropout_seed: Tensor | int | None, backend: str
) -> Tensor:
    """The part of an activation without options that the direct path does not support."""
    _check(x, bias)
    return resolve(op, backend, x)(x, bias, *dropout.arguments(x, dropout_p, dropout_seed))


def _check(x: Tensor, bias: Tensor | None) -> None:
    check_float("x", x)
    if x.dim() == 0:
        raise ValueError("x must have at least one dimension; got a scalar")
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, (x.shape[-1],), "the width of x")
        check_device("bias", bias, "x", x)
        if bias.dtype == torch.float64 != x.dtype:
            raise TypeError(f"bias may be float64 only where x is; got x of {x.dtype}")


BIAS_GELU = register_op(bias_gelu, reference.bias_gelu, cuda_order=NATIVE_FIRST)
BIAS_SILU = register_op(bias_silu, reference.bias_silu)
BIAS_RELU = register_op(bias_relu, reference.bias_relu)
