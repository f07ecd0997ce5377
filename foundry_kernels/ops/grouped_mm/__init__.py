r"""Grouped matmul: each group of rows is multiplied by its own matrix, as in the layers of a mixture of experts.

The rows of x are sorted by group. With :math:`o_e` the end of group e and :math:`o_{-1} = 0`

.. math:: y_i = x_i W_e, \quad dx_i = dy_i W_e^T \quad (o_{e-1} \le i < o_e), \qquad
          dW_e = \sum_{i=o_{e-1}}^{o_e-1} x_i^T dy_i

and rows from :math:`o_{E-1}` on are zero. Sums are in float32 (float64 for float64 inputs) and are rounded once;
float32 inputs are multiplied in full precision, 16-bit ones by matrix instructions if the device has them.

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

    Like ``torch.nn.functional.grouped_mm`` of a 2-D and a 3-D tensor, for any sizes and strides.

    Args:
        x: ``[M, K]`` float32, bfloat16, float16 or float64, any strides, with the rows of a group next to each other.
        weight: ``[E, K, N]``, of x's dtype and device, E at least 1. Any strides: a transposed view of ``[E, N, K]``
            costs nothing. M, K and N may be 0.
        offs: ``[E]`` int32 on x's device, where the groups end: never decreasing, from 0 to M. A group may be empty.
            This is checked on the CPU. On a GPU a check would wait for the numbers: nothing outside the tensors is read
            or written there, and y is undefined if they are wrong.
        batch_invariant: whether a row of y, and of x's gradient, has the same bits whatever other rows there are, and
            the gradient of `weight` has the same bits for any number of threads. On a GPU Triton then uses one tile for
            groups of all sizes. On a CPU matmuls run on :func:`decode_linear`'s kernel with any number of rows, which
            supports float32, bfloat16 and float16. Always on within :func:`foundry_kernels.batch_invariant`.
        backend: "auto", "reference", "triton" or "native". On a GPU "auto" tries "triton" first. Its large bfloat16
            gradients on compute capability 9.0 are PyTorch's, which an H100 measured to be faster. On a CPU the native
            backend also uses `decode_linear`'s kernel for groups of few rows if the matrices are stored as ``[E, N,
            K]``. Other matmuls are PyTorch's, with two exceptions: in float32 they are the extension's where PyTorch's
            leave half of the processor unused (MKL on AMD from Zen 5 on), and 16-bit matmuls run in float32 where
            oneDNN has no instructions for them.

    Returns:
        ``[M, N]``, contiguous, of x's dtype. Rows from ``offs[-1]`` on are zero, and so is the gradient of these rows
        of x; that of an empty group's matrix is zero too.

    Raises:
        TypeError: an argument is not a tensor or has the wrong kind of dtype.
        ValueError: shapes, dtypes or devices do not match; on the CPU, `offs` decreases or leaves 0 .. M; the backend
            is unknown.
        BackendUnavailable: the named backend does not support this device or dtype.

    Under autocast x and weight are first cast to its dtype, as in a linear layer. NaN in one group does not spread to
    others. The kernels do not synchronize with the host and have no second derivative; the reference synchronizes and
    has one.
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
