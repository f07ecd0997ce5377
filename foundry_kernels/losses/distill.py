"""Distillation: the divergence between a student and a teacher, on the student's own samples or a dataset's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_bool, check_number, check_shape, check_tensor
from foundry_kernels.losses.tokens import check_items, over_items
from foundry_kernels.ops.kl_div import kl_div
from foundry_kernels.ops.linear_kl_div import linear_kl_div
from foundry_kernels.ops.linear_kl_div.teacher import log_tail
from foundry_kernels.ops.log_probs import log_probs

Batch = TypeVar("Batch")


class DistillationMetrics(NamedTuple):
    loss: Tensor
    #: The mean of the divergence over the tokens of this call that count, without a gradient.
    divergence: Tensor
    #: The mean of the student's entropy over these tokens, at the temperature of the loss, without a gradient.
    entropy: Tensor


def gkd(
    logits: Tensor,
    teacher_logits: Tensor,
    mask: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    direction: str = "jsd",
    num_items_in_batch: Tensor | int | None = None,
    return_metrics: bool = False,
) -> Any:
    r"""Generalised knowledge distillation: over the tokens that count, :math:`\frac1N \sum_t` of the Jensen-Shannon
    divergence :math:`\beta \, \mathrm{KL}(p \| m) + (1 - \beta) \, \mathrm{KL}(q \| m)` of teacher p and student q,
    with :math:`m = \beta p + (1 - \beta) q`; for a beta of 0 :math:`\mathrm{KL}(p \| q)`, for 1 :math:`\mathrm{KL}(q \|
    p)`. As in TRL, it is not multiplied by the square of the temperature.

    Args:
        logits, teacher_logits: ``[B, T, V]``. Log-probabilities are logits too; so these may also be ``[B, T, k]`` of k
            classes, or ``[B, T, k + 1]`` with the others in one bucket (:func:`with_tail`).
        mask: ``[B, T]``, nonzero where a token counts.
        beta: the teacher's share.
        temperature: both logits are divided by it.
        direction: "jsd"; or what replaces it, as for :func:`foundry_kernels.kl_div`: "forward", "reverse", "tvd".
        num_items_in_batch: N, the tokens of all micro-batches and devices of a step; None counts those of this call. A
            number or a tensor of one.
        return_metrics: whether to return :class:`DistillationMetrics`.

    Returns:
        A scalar, or the metrics with it. 0, with gradients of 0, if no token counts.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Agarwal et al., "On-Policy Distillation of Language Models", 2024, arXiv:2306.13649.
    """
    check_tensor("logits", logits)
    check_tensor("mask", mask)
    check_shape("mask", mask, tuple(logits.shape[:-1]), "that of logits without the last dimension")
    check_bool("return_metrics", return_metrics)
    target = torch.where(mask.bool(), 0, -100)
    total = kl_div(
        logits, teacher_logits, target=target, temperature=temperature, direction=direction, beta=beta, reduction="sum"
    )
    entropy = None
    if return_metrics:
        _, entropy = log_probs(logits.detach(), target, logit_scale=1.0 / temperature, return_entropy=True)
    return _result(total, target != -100, entropy, num_items_in_batch)


def gkd_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    direction: str = "jsd",
    num_items_in_batch: Tensor | int | None = None,
    return_metrics: bool = False,
    **options: Any,
) -> Any:
    """:func:`gkd` of hidden states ``[..., D]`` and the head's `weight` ``[V, D]`` of the student, and those of the
    teacher, whose width may be another; `target` ``[...]`` is `ignore_index` where a token does not count.

    Args:
        options: those of :func:`foundry_kernels.linear_kl_div` except `reduction` and `return_entropy`: bias, scale and
            soft cap of each head; `teacher_logits`, or `teacher_ids` and `teacher_log_probs` from a server, in place of
            the teacher's hidden states.

    Raises:
        As :func:`foundry_kernels.linear_kl_div`; ValueError if `num_items_in_batch` is a negative number.
    """
    check_bool("return_metrics", return_metrics)
    if num_items_in_batch is not None:
        check_items(num_items_in_batch)
    found: Any = linear_kl_div(
        hidden, weight, teacher_hidden, teacher_weight, target=target, temperature=temperature, direction=direction,
        beta=beta, reduction="sum", return_entropy=return_metrics, **options,
    )  # fmt: skip
    total, entropy = found if return_metrics else (found, None)
    return _result(total, target != options.get("ignore_index", -100), entropy, num_items_in_batch)


def _result(total: Tensor, counts: Tensor, entropy: Tensor | None, items: Any) -> Any:
    if items is not None:
        check_items(items)
    n = counts.sum().clamp(min=1)
    loss = over_items(total, n if items is None else items).reshape(())
    if entropy is None:
        return loss
    return DistillationMetrics(loss, total.detach() / n, torch.where(counts, entropy, 0.0).sum() / n)


def with_tail(log_probs: Tensor) -> Tensor:
    """Log-probabilities ``[..., k]`` of some classes, and as one more ``[..., k + 1]`` that of all others together, at
    least that of 1e-7."""
    return torch.cat([log_probs, log_tail(log_probs)], -1)


def on_policy_batch(
    batch: Batch,
    sample: Callable[[Batch], Batch],
    *,
    lmbda: float = 0.5,
    sample_teacher: Callable[[Batch], Batch] | None = None,
    generator: torch.Generator | None = None,
) -> Batch:
    """Chooses what a step learns from: with probability `lmbda` answers of the student to the batch's prompts, else the
    batch itself.

    Args:
        batch: of a dataset, in any form.
        sample: a function of the batch that returns one with the student's answers. It samples at the temperature of
            the loss, without a gradient, and makes the targets: `ignore_index` for the prompts and behind the end of an
            answer.
        lmbda: 0 for a dataset's answers alone, 1 for the student's alone.
        sample_teacher: a function that returns one with the teacher's answers, in place of the batch itself
            (sequence-level distillation).
        generator: on a CPU. Devices that train one model need the same draws, thus the same seed.
    """
    check_number("lmbda", lmbda)
    if not 0.0 <= lmbda <= 1.0:
        raise ValueError(f"lmbda must be in 0 .. 1; got {lmbda}")
    if torch.rand((), generator=generator).item() < lmbda:
        return sample(batch)
    return batch if sample_teacher is None else sample_teacher(batch)
