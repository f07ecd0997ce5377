r"""What the engine in `_linear_loss` needs to know of a divergence: a kernel gets a chunk's logits of student and
teacher, and makes the losses and, over the student's logits, their gradient in one go.

So a reduced loss takes one matmul for the teacher and three for the student. With reduction "none" the gradients of the
losses are known later: the backward pass does the same again, with these. There are no blocks of classes, as a
divergence needs the normalizers of both sides.

Of a teacher that lists k classes, the same kernel gets the k logits of the student, and as one more the log-sum-exp r
of the others. The gradient of such a logit :math:`y_j` is that of r times :math:`e^{y_j - r}`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear_loss.problem import GRADIENTS, Chunk, Inputs, Loss, RowKernel
from foundry_kernels.ops.kl_div.options import KlDivOptions
from foundry_kernels.ops.kl_div.reference import capped
from foundry_kernels.ops.linear_kl_div.options import LinearKlDivOptions
from foundry_kernels.ops.linear_kl_div.teacher import Listed, Teacher, TeacherLogits
from foundry_kernels.ops.log_probs.options import LogProbsOptions

LOSS = Loss(
    "linear_kl_div",
    LinearKlDivOptions,
    outputs=("loss", "entropy", *GRADIENTS),
    constants=tuple(f"teacher_{name}" for name in Teacher._fields),
    flags={"entropy": "save_entropy"},
    reduced=("loss",),
    logits=2,
    tiles=False,
)


class KlDivRows(RowKernel):
    """The divergences of logits that exist. A backend computes `rows`, `of_student` and `spread_`."""

    def __init__(self, inputs: Inputs, constants: tuple[Tensor | None, ...], options: Any) -> None:
        super().__init__(inputs, constants, options)
        self.teacher = TeacherLogits(Teacher(*constants), inputs.target, options, self.n_classes, self.cpu)

    def rows(
        self, logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions, dloss: Tensor | None
    ) -> Tensor:
        """Each token's loss; with `dloss`, the gradient of each token's loss, the logits' own gradient is written over
        them."""
        raise NotImplementedError

    def of_student(self, logits: Tensor, target: Tensor, options: LogProbsOptions, result: str) -> Tensor:
        """Each token's "entropy" or "lse"."""
        raise NotImplementedError

    def spread_(self, logits: Tensor, target: Tensor, options: LogProbsOptions, lse: Tensor, dlse: Tensor) -> None:
        """Writes over the logits their gradient, from that of each token's log-sum-exp."""
        raise NotImplementedError

    def forward(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        part, logits, target = chunk
        found = {}
        if "entropy" in wanted:
            options = self.options.of_student()
            found["entropy"] = self.of_student(logits, self._known(target), options, "entropy")
        if self.teacher.listed is None:
            found["loss"] = self.rows(logits, self.teacher.logits(part), target, self.options.of_logits(), dloss)
        else:
            found["loss"] = self._of_listed(chunk, self.teacher.listed.rows(part), dloss)
        return found

    def gradients_(self, chunk: Chunk, dloss: Tensor, saved: tuple[Tensor, ...], first: int) -> None:
        self.forward(chunk, frozenset(), dloss)

    def _known(self, target: Tensor) -> Tensor:
        """Targets that a kernel may read: class 0, or -100 of a token that does not count."""
        return torch.where(target == self.options.ignore_index, -100, 0)

    def _of_listed(self, chunk: Chunk, listed: Listed, dloss: Tensor | None) -> Tensor:
        (_, logits, target), options, student = chunk, self.options, self.options.of_student()
        picked = logits.gather(1, listed.ids)
        y = capped(picked.to(wide_dtype(logits.dtype)) * student.logit_scale, student.softcap)
        rest = None
        if options.add_tail:
            logits.scatter_(1, listed.ids, picked.masked_fill(listed.counts > 0, -torch.inf))
            rest = self._log_sum_exp(logits, self._known(target), listed, student)
        of_student, of_teacher = listed.buckets(y, rest)
        loss = self.rows(of_student, of_teacher, target, options.of_buckets(), dloss)
        if dloss is None:
            return loss
        d = of_student[:, : y.shape[1]] * student.logit_scale
        if student.softcap is not None:
            d *= 1.0 - (y / student.softcap).square()
        if rest is None:
            logits.zero_()
        else:
            self.spread_(logits, self._known(target), student, rest.squeeze(1), of_student[:, -1].contiguous())
        # Entries that are not valid write what the token's first one writes, or what is there.
        d = torch.where(listed.valid, d, d[:, :1]).to(logits.dtype)
        logits.scatter_(1, listed.ids, torch.where(listed.counts > 0, d, logits.gather(1, listed.ids)))
        return loss

    def _log_sum_exp(self, logits: Tensor, target: Tensor, listed: Listed, options: LogProbsOptions) -> Tensor:
        """``[n, 1]`` of the classes that are not listed. The logits of the others are minus infinity; a soft cap makes
        of them the lowest that it allows, which are taken away again."""
        found = self.of_student(logits, target, options, "lse").unsqueeze(1)
        if options.softcap is not None:
            found = found + torch.log1p(-listed.counts * torch.exp(-options.softcap - found))
        return found.masked_fill(listed.counts == self.n_classes, -torch.inf)
