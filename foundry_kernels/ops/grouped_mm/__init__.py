r"""Matrix products of groups of rows, each group with a matrix of its own: the layers of a mixture of experts.

The rows of x lie sorted by group. With :math:`o_e` the end of group e and :math:`o_{-1} = 0`

.. math:: y_i = x_i W_e, \quad dx_i = dy_i W_e^T \quad (o_{e-1} \le i < o_e), \qquad
          dW_e = \sum_{i=o_{e-1}}^{o_e-1} x_i^T dy_i

and rows from :math:`o_{E-1}` on are zero. Sums are in float32 (float64 for float64 inputs) and are rounded once;
float32 inputs are multiplied in full precision, 16-bit ones by matrix instructions where there are some.

Gale et al., "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", 2022, arXiv:2211.15841.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core import invariance
from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_float,
    check_rank,
    check_shape,
    check_tensor,
)
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.grouped_mm import flops, reference


def grouped_mm(
    x: Tensor, weight: Tensor, offs: Tensor, *, batch_invariant: bool = False, backend: str = "auto"
) -> Tensor:
    """Rows ``offs[e-1] .. offs[e] - 1`` of `x` times ``weight[e]``.

    What ``torch.nn.functional.grouped_mm`` does of a 2-D and a 3-D tensor, for any sizes and strides.

    Args:
        x: ``[M, K]`` float32, bfloat16, float16 or float64, any strides, the rows of a group side by side.
        weight: ``[E, K, N]``, of x's dtype and device, E at least 1. Any strides: a transposed view of ``[E, N, K]``
            costs nothing. M, K and N may be 0.
        offs: ``[E]`` int32 on x's device, where the groups end: never decreasing, from 0 to M. A group may be empty.
            This is checked on the CPU. On a GPU, where the check would have to wait for the numbers, nothing outside
            the tensors is read or written, and what y holds is undefined where they are wrong.
        batch_invariant: a row of y, and of x's gradient, has the same bits whatever other rows there are, and the
            gradient of `weight` the same for any number of threads. On a GPU Triton then takes one tile for groups of
            all sizes; on a CPU the products are those of :func:`decode_linear`'s kernel, with any number of rows, which
            take float32, bfloat16 and float16. Always on within :func:`foundry_kernels.batch_invariant`.
        backend: "auto", "reference", "triton" or "native". On a GPU "auto" takes "triton" first, whose gradients are
            PyTorch's where an H100 has shown these to be faster: large ones in bfloat16, on compute capability 9.0. On
            a CPU the native one has that kernel for groups of few rows too, whose matrices lie as ``[E, N, K]``; other
            products are PyTorch's, but the extension's in float32 where those leave half of the processor unused (MKL
            on AMD's from Zen 5 on), and in float32 where oneDNN has no instructions for 16 bits.

    Returns:
        ``[M, N]``, contiguous, of x's dtype. Rows from ``offs[-1]`` on are zero, and so is the gradient of these rows
        of x; that of an empty group's matrix is zero too.

    Raises:
        TypeError: an argument is not a tensor or has the wrong kind of dtype.
        ValueError: shapes, dtypes or devices do not match; on the CPU, `offs` decreases or leaves 0 .. M; the backend
            is unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Under autocast x and weight are rounded to its dtype first, as a linear layer's are. What is not a number in one
    group stays there. The kernels wait for nothing on the host and have no second derivative; the reference does both.
    """
    if not is_dynamo_compiling():
        batch_invariant = True if batch_invariant is False and invariance.on else batch_invariant
        y = GROUPED_MM.direct(backend, x, weight, offs, batch_invariant)
        if y is not None:
            return y
    check_float("x", x)
    check_float("weight", weight)
    if (low := autocast_dtype(x)) is not None:
        x, weight = x.to(low), weight.to(low)
    _check(x, weight, offs)
    check_bool("batch_invariant", batch_invariant)
    return resolve(GROUPED_MM, backend, x)(x, weight, offs, batch_invariant or invariance.on)


def _check(x: Tensor, weight: Tensor, offs: Tensor) -> None:
    check_rank("x", x, 2, "[M, K]")
    check_rank("weight", weight, 3, "[E, K, N]")
    if weight.shape[0] == 0:
        raise ValueError(f"weight must hold at least one matrix; got shape {tuple(weight.shape)}")
    check_shape("weight", weight, (weight.shape[0], x.shape[1], weight.shape[2]), "[E, K, N], K the width of x")
    check_dtype("weight", weight, "x", x)
    check_device("weight", weight, "x", x)
    check_tensor("offs", offs)
    if offs.dtype != torch.int32:
        raise TypeError(f"offs must be int32; got {offs.dtype}")
    check_shape("offs", offs, (weight.shape[0],), "the end of each group")
    check_device("offs", offs, "x", x)
    if x.is_cpu and reference.values_known(offs):
        reference.check_ends(offs.tolist(), x.shape[0])


GROUPED_MM = register_op(grouped_mm, reference.grouped_mm)
flops.register()
