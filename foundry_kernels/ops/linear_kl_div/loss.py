r"""What the engine in `_linear_loss` needs to know of a divergence: a kernel gets a chunk's logits of student and
teacher, and makes the losses and, over the student's logits, their gradient in one go.

So a reduced loss takes one matmul for the teacher and three for the student. With reduction "none" the gradients of the
losses are known later: the backward pass does the same again, with these. There are no blocks of classes, as a
divergence needs the normalizers of both sides.

Of a teacher that lists k classes, the same kernel gets the k logits of the student, and as one more the log-sum-exp r
of the others. The gradient of such a logit :math:`y_j` is that of r times :math:`e^{y_j - r}`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


class _Student(NamedTuple):
    """The options of a kernel of log-probabilities."""

    logits: LogProbsOptions

    def of_logits(self) -> LogProbsOptions:
        return self.logits


class KlDivRows(RowKernel):
    """The divergences of logits that exist. A backend computes `rows`, and its `log_probs` are those of
    linear_log_probs."""

    log_probs: type[RowKernel]

    def __init__(self, inputs: Inputs, constants: tuple[Tensor | None, ...], options: Any) -> None:
        super().__init__(inputs, constants, options)
        self.teacher = TeacherLogits(Teacher(*constants), inputs.target, options, self.n_classes, self.cpu)
        self.student = self.log_probs(inputs, (), _Student(options.of_student()))

    def rows(
        self, logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions, dloss: Tensor | None
    ) -> Tensor:
        """Each token's loss; with `dloss`, the gradient of each token's loss, the logits' own gradient is written over
        them."""
        raise NotImplementedError

    def forward(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        part, logits, target = chunk
        found = {}
        if "entropy" in wanted:
            found["entropy"] = self._of_student(chunk, "entropy")
        if self.teacher.listed is None:
            found["loss"] = self.rows(logits, self.teacher.logits(part), target, self.options.of_logits(), dloss)
        else:
            found["loss"] = self._of_listed(chunk, self.teacher.listed.rows(part), dloss)
        return found

    def gradients_(self, chunk: Chunk, dloss: Tensor, saved: tuple[Tensor, ...], first: int) -> None:
        self.forward(chunk, frozenset(), dloss)

    def _of_student(self, chunk: Chunk, result: str) -> Tensor:
        return self.student.forward(self._counting(chunk), frozenset({result}), None)[result]

    def _counting(self, chunk: Chunk) -> Chunk:
        """The chunk with targets that a kernel may read: class 0, or -100 of a token that does not count."""
        return chunk._replace(target=torch.where(chunk.target == self.options.ignore_index, -100, 0))

    def _of_listed(self, chunk: Chunk, listed: Listed, dloss: Tensor | None) -> Tensor:
        (_, logits, target), options, student = chunk, self.options, self.options.of_student()
        picked = logits.gather(1, listed.ids)
        y = capped(picked.to(wide_dtype(logits.dtype)) * student.logit_scale, student.softcap)
        rest = None
        if options.add_tail:
            logits.scatter_(1, listed.ids, picked.masked_fill(listed.counts > 0, -torch.inf))
            rest = self._log_sum_exp(chunk, listed, student.softcap)
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
            none, share = torch.zeros_like(rest), of_student[:, -1:]
            saved = (rest.squeeze(1), none.squeeze(1))
            self.student.gradients_(self._counting(chunk), torch.cat([none, share], 1), saved, 0)
        # Entries that are not valid write what the token's first one writes, or what is there.
        d = torch.where(listed.valid, d, d[:, :1]).to(logits.dtype)
        logits.scatter_(1, listed.ids, torch.where(listed.counts > 0, d, logits.gather(1, listed.ids)))
        return loss

    def _log_sum_exp(self, chunk: Chunk, listed: Listed, softcap: float | None) -> Tensor:
        """``[n, 1]`` of the classes that are not listed, whose logits are minus infinity: those of the others are not,
        or the lowest that a soft cap allows, which are taken away again."""
        found = self._of_student(chunk, "lse").unsqueeze(1)
        if softcap is not None:
            found = found + torch.log1p(-listed.counts * torch.exp(-softcap - found))
        return found.masked_fill(listed.counts == self.n_classes, -torch.inf)
