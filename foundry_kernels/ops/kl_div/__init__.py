r"""Divergences between the distributions of a teacher and a student, for distillation.

Of a token with logits :math:`x` of the student and :math:`a` of the teacher, let :math:`q = \mathrm{softmax}(x / T)`
and :math:`p = \mathrm{softmax}(a / T)` for the temperature T. The divergence is

.. math:: \text{forward: } \mathrm{KL}(p \| q) = \sum_j p_j d_j, \quad d_j = \log p_j - \log q_j, \qquad
   \text{reverse: } \mathrm{KL}(q \| p) = -\sum_j q_j d_j

.. math:: \text{jsd: } \beta \, \mathrm{KL}(p \| m) + (1 - \beta) \, \mathrm{KL}(q \| m), \quad
   m = \beta p + (1 - \beta) q, \qquad \text{tvd: } \tfrac12 \sum_j |q_j - p_j|

and its gradient, of :math:`x_j`, with the sign :math:`s_j` of :math:`q_j - p_j`,

.. math:: \tfrac1T (q_j - p_j), \qquad -\tfrac1T q_j \left(d_j + \mathrm{KL}(q \| p)\right), \qquad
   \tfrac{1 - \beta}{T} q_j \left(\log \tfrac{q_j}{m_j} - \mathrm{KL}(q \| m)\right), \qquad
   \tfrac1{2T} q_j \left(s_j - \textstyle\sum_i q_i s_i\right)

A kernel finds both normalizers of a row in one pass over the logits and the divergence in a second one. The gradient of
the forward divergence is written in the second pass, the others in a third one. So nothing is saved but the logits, and
a kernel that has the logits anyway makes loss and gradient at once (:func:`foundry_kernels.linear_kl_div`).

A term of a KL divergence is summed as :math:`p_j d_j + q_j - p_j`, which is never negative in exact arithmetic and adds
:math:`\sum_j (q_j - p_j) = 0`: errors of the normalizers cancel to first order, so small divergences are accurate. A
divergence that is negative by rounding becomes 0. A class of probability 0 has no term with a logarithm. The mixture's
logarithm comes from :math:`e^{-|d_j|}`, so nothing overflows. Arithmetic is in float32 (float64 for float64 logits).

Hinton et al., "Distilling the Knowledge in a Neural Network", 2015, arXiv:1503.02531; Agarwal et al., "On-Policy
Distillation of Language Models", 2024, arXiv:2306.13649 (GKD).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from foundry_kernels.core.checks import (
    check_device,
    check_float,
    check_int,
    check_integer,
    check_not_negative,
    check_positive,
    check_shape,
    constants,
)
from foundry_kernels.core.registry import resolve
from foundry_kernels.ops import cross_entropy as losses
from foundry_kernels.ops._register import register_op
from foundry_kernels.ops.cross_entropy.options import LossOptions
from foundry_kernels.ops.kl_div import reference
from foundry_kernels.ops.kl_div.options import KlDivOptions

DIRECTIONS = ("forward", "reverse", "jsd", "tvd")


def kl_div(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    target: Tensor | None = None,
    temperature: float = 1.0,
    direction: str = "forward",
    beta: float = 0.5,
    ignore_index: int = -100,
    reduction: str = "mean",
    backend: str = "auto",
) -> Tensor:
    """The divergence of each token between a teacher's and a student's distribution.

    Args:
        logits: ``[..., V]`` of the student: float32, bfloat16, float16 or float64, any strides, V at least 1.
        teacher_logits: ``[..., V]``, on logits' device. Its dtype may differ, unless one of them is float64. It is a
            constant: it gets no gradient, whether it requires one or not.
        target: ``[...]`` int32 or int64, or None. Tokens with the target `ignore_index` are ignored: their results and
            gradients are 0, whatever their logits are. No other target is read. None: all tokens count.
        temperature: both logits are divided by it. The loss is not multiplied by its square.
        direction: "forward" for KL(teacher || student), "reverse" for KL(student || teacher), "jsd" for the
            generalized Jensen-Shannon divergence, or "tvd" for the total variation distance.
        beta: the teacher's share of the mixture of "jsd", in 0 .. 1. As in TRL's GKD and Liger's JSD, 0 means the
            forward and 1 the reverse divergence, not the limits of the formula, which are 0.
        ignore_index: see `target`.
        reduction: "none", "mean" (over the tokens that count; 0 if there are none) or "sum".
        backend: "auto", "reference", "triton" or "native" (on the CPU).

    Returns:
        ``[...]`` for "none", else a scalar; float32 (float64 for float64 logits). At least 0.

    Raises:
        TypeError: an argument is not a tensor or has an unsupported dtype.
        ValueError: shapes or devices do not match, V is 0, `temperature` is not a positive finite number, or
            `direction`, `beta`, `reduction` or the backend's name is not supported.
        BackendUnavailable: the named backend does not support this device or dtype.

    Autocast does not change the computation. The backward pass needs both logits and writes the gradient, in the
    logits' dtype; it computes the distributions once more. There is no second derivative. Results have the same bits in
    each run.
    """
    if (
        not is_dynamo_compiling()
        and (
            found := KL_DIV.direct(
                backend, logits, teacher_logits, target, temperature, direction, beta, ignore_index, reduction
            )
        )
        is not None
    ):
        return found
    check_float("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must have a last dimension of at least 1; got shape {tuple(logits.shape)}")
    check_teacher("teacher_logits", teacher_logits, "logits", logits)
    check_shape("teacher_logits", teacher_logits, tuple(logits.shape), "that of logits: one vocabulary")
    options = make_options(target, temperature, direction, beta, ignore_index, reduction)
    target = check_target("logits", logits, target)
    each = resolve(KL_DIV, backend, logits)(logits, teacher_logits.detach(), target, options)
    return each if reduction == "none" else reduced(each, target, options.ignore_index, reduction)


def check_teacher(name: str, x: Tensor, student: str, of_student: Tensor) -> None:
    """A tensor of the teacher: a dtype that is computed in the same precision, on the student's device."""
    check_float(name, x)
    check_device(name, x, student, of_student)
    if (x.dtype == torch.float64) != (of_student.dtype == torch.float64):
        raise ValueError(f"{name} must be float64 if and only if {student} is, {of_student.dtype}; got {x.dtype}")


def make_options(
    target: Tensor | None, temperature: float, direction: str, beta: float, ignore_index: int, reduction: str
) -> KlDivOptions:
    """Checks all arguments that are no tensors."""
    temperature, beta = constants(temperature, beta)
    check_positive("temperature", temperature)
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}; got {direction!r}")
    check_not_negative("beta", beta)
    if beta > 1.0:
        raise ValueError(f"beta must be in 0 .. 1; got {beta}")
    check_int("ignore_index", ignore_index)
    if reduction not in losses.REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(losses.REDUCTIONS)}; got {reduction!r}")
    if direction == "jsd" and beta in (0.0, 1.0):
        direction = "reverse" if beta else "forward"
    return KlDivOptions(
        -100 if target is None else ignore_index, float(temperature), direction, float(beta), None, None
    )


def check_target(name: str, x: Tensor, target: Tensor | None) -> Tensor:
    """The checked target; without one, targets by which all tokens of `x` count."""
    if target is None:
        return x.new_zeros(x.shape[:-1], dtype=torch.int32)
    check_integer("target", target)
    check_shape("target", target, x.shape[:-1], f"that of {name} without the last dimension")
    check_device("target", target, name, x)
    return target


def reduced(each: Tensor, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """The sum or the mean of the tokens' losses, by PyTorch's operations; so also across devices."""
    return losses.reduced(each, None, None, target, None, LossOptions(ignore_index, reduction, 0.0, 0.0, None))[0]


KL_DIV = register_op(kl_div, reference.kl_div, native_devices=("cpu",))
