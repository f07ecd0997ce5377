r"""Weighted sums of rows: the outputs of a mixture of experts, back in the order of its tokens.

With row :math:`s_{tj}` of x being the output of token t's j-th expert,

.. math:: y_t = \sum_j w_{tj} \, x_{s_{tj}}, \qquad dx_{s_{tj}} = w_{tj} \, dy_t, \qquad
          dw_{tj} = \langle x_{s_{tj}}, dy_t \rangle

where choices without a row (:math:`s_{tj} = -1`) add nothing. Sums are in float32 (float64 for float64 inputs), in the
order of j, and are rounded once.

Without weights it is the gradient of ``x[tokens]``, a copy of each token's row for each of its experts.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import check_device, check_float, check_integer, check_rank, check_shape
from foundry_kernels.core.registry import is_subclass, resolve
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.combine_experts import reference


def combine_experts(x: Tensor, weights: Tensor | None, slots: Tensor, *, backend: str = "auto") -> Tensor:
    """``y[t] = sum over j of weights[t, j] * x[slots[t, j]]``.

    Args:
        x: ``[M, D]`` float32, bfloat16, float16 or float64, any strides; M and D may be 0.
        weights: ``[T, k]``, float32 or of x's dtype, on x's device; None for a plain sum.
        slots: ``[T, k]`` int32 or int64 on x's device, k at least 1: a row of x, 0 .. M - 1, or -1, which adds nothing.
            Slots are checked on the CPU. On a GPU a check would have to wait for the numbers: nothing outside x is read
            there, and a token with an invalid slot becomes NaN. A row may belong to one slot only; if it belongs to
            several, its gradient is undefined. This is not checked.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        ``[T, D]``, contiguous, of x's dtype. The gradient is zero for rows of x that no slot names and for the weights
        of slots that are -1.

    Raises:
        TypeError: an argument is not a tensor or has the wrong kind of dtype.
        ValueError: shapes or devices do not match, or the backend is unknown.
        IndexError: on the CPU, a slot is neither -1 nor a row of x.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast has no effect: arithmetic is in float32 anyway. There are no atomic additions: results and gradients are
    bitwise deterministic. Kernels have no second derivative.
    """
    if not is_dynamo_compiling():
        y = COMBINE_EXPERTS.direct(backend, x, weights, slots)
        if y is not None:
            return y
    check_float("x", x)
    check_rank("x", x, 2, "[M, D]")
    check_integer("slots", slots, 2, "[T, k]")
    if slots.shape[1] == 0:
        raise ValueError(f"slots must be [T, k] with k at least 1; got shape {tuple(slots.shape)}")
    check_device("slots", slots, "x", x)
    if weights is not None:
        check_float("weights", weights)
        if weights.dtype not in (torch.float32, x.dtype):
            raise TypeError(f"weights must be float32 or of x's dtype {x.dtype}; got {weights.dtype}")
        check_shape("weights", weights, tuple(slots.shape), "that of slots")
        check_device("weights", weights, "x", x)
    if x.is_cpu and not (torch.compiler.is_compiling() or is_subclass(slots)) and slots.numel():
        least, most = (int(each) for each in slots.aminmax())
        if least < -1 or most >= x.shape[0]:
            wrong = least if least < -1 else most
            raise IndexError(f"slots must be -1 or a row of x, 0 .. {x.shape[0] - 1}; got {wrong}")
    return resolve(COMBINE_EXPERTS, backend, x)(x, weights, slots)


COMBINE_EXPERTS = register_op(combine_experts, reference.combine_experts)
