"""Plain PyTorch, with all logits, differentiated by autograd: what every other strategy must equal."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops import kl_div as of_logits
from foundry_kernels.ops._linear_loss.reference import all_logits
from foundry_kernels.ops.kl_div import reference
from foundry_kernels.ops.linear_kl_div.options import LinearKlDivOptions
from foundry_kernels.ops.linear_kl_div.teacher import Listed
from foundry_kernels.ops.log_probs.reference import log_probs


def linear_kl_div(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, low: Tensor | None, up: Tensor | None,
    teacher_hidden: Tensor | None, teacher_weight: Tensor | None, teacher_bias: Tensor | None,
    teacher_logits: Tensor | None, teacher_ids: Tensor | None, teacher_log_probs: Tensor | None,
    options: LinearKlDivOptions,
) -> dict[str, Tensor | None]:  # fmt: skip
    logits = all_logits(hidden, weight, target, bias, low, up, options)
    entropy = None
    counts = target != options.ignore_index
    if options.return_entropy:
        student = options.of_student()._replace(return_entropy=True)
        entropy = log_probs(logits.detach(), torch.where(counts, 0, -100), student)[1]
    if teacher_ids is not None:
        assert teacher_log_probs is not None
        listed = Listed.of(teacher_ids, teacher_log_probs, counts, logits.shape[-1])
        of_buckets = _buckets(logits, counts, listed, options)
        each = reference.kl_div(*of_buckets, target.reshape(-1), options.of_buckets()).view(target.shape)
    else:
        if teacher_logits is None:
            assert teacher_hidden is not None
            assert teacher_weight is not None
            teacher_logits = all_logits(
                teacher_hidden, teacher_weight, target, teacher_bias, None, None, options.of_teacher()
            )
        each = reference.kl_div(logits, teacher_logits, target, options.of_logits())
    if options.reduction != "none":
        each = of_logits.reduced(each, target, options.ignore_index, options.reduction)
    return {"loss": each, "entropy": entropy}


def _buckets(logits: Tensor, counts: Tensor, listed: Listed, options: LinearKlDivOptions) -> tuple[Tensor, Tensor]:
    """The logits of the classes that each token lists and, with a tail, the log-sum-exp of the others: student's and
    teacher's."""
    student = options.of_student()
    x = torch.where(counts.reshape(-1, 1), logits.reshape(-1, logits.shape[-1]).to(wide_dtype(logits.dtype)), 0.0)
    y = reference.capped(x * student.logit_scale, student.softcap)
    rest = None
    if options.add_tail:
        is_listed = torch.zeros_like(y, dtype=torch.bool).scatter(
            1, listed.ids, (listed.counts > 0).expand_as(listed.ids)
        )
        whole = listed.counts == y.shape[1]  # an empty sum's gradient would be NaN
        rest = torch.logsumexp(y.masked_fill(is_listed & ~whole, -torch.inf), 1, keepdim=True)
        rest = rest.masked_fill(whole, -torch.inf)
    return listed.buckets(y.gather(1, listed.ids), rest)
