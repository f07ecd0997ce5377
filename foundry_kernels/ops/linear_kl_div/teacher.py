"""The teacher's side of a call: constants, of which a chunk's logits are made or taken at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops._linear_loss.chunks import Tokens, rows_of
from foundry_kernels.ops._linear_loss.problem import Inputs
from foundry_kernels.ops.linear_kl_div.options import LinearKlDivOptions


def log_tail(log_probs: Tensor) -> Tensor:
    """The log-probability ``[..., 1]`` of all classes except those ``[..., k]``, by a difference in float64. It is at
    least that of 1e-7, as float32 log-probabilities tell no smaller one."""
    others = 1.0 - log_probs.double().exp().sum(-1, keepdim=True)
    return others.clamp(min=1e-7).log().to(log_probs.dtype)


class Teacher(NamedTuple):
    """Hidden states, a weight and perhaps a bias; or logits; or some classes of each token and their
    log-probabilities."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    logits: Tensor | None
    ids: Tensor | None
    log_probs: Tensor | None

    def detached(self) -> Teacher:
        return Teacher(*(None if x is None else x.detach() for x in self))


class Listed(NamedTuple):
    """The k classes that a teacher lists for each of n tokens.

    ids: ``[n, k]`` int64, where each entry that is not `valid` repeats the token's first one, or is 0 if there is none.
    log_probs: ``[n, k]``, minus infinity where not valid. counts: ``[n, 1]``, how many are.
    """

    ids: Tensor
    log_probs: Tensor
    valid: Tensor
    counts: Tensor

    @classmethod
    def of(cls, ids: Tensor, log_probs: Tensor, counts: Tensor, n_classes: int) -> Listed:
        """An entry is valid if it has a probability, belongs to one of the tokens that count, and lists a class that no
        entry before lists. A class out of range raises IndexError on a CPU and makes the token's results NaN
        elsewhere."""
        ids, log_probs = (x.reshape(-1, x.shape[-1]) for x in (ids.long(), log_probs))
        valid = counts.reshape(-1, 1) & (log_probs != -torch.inf)
        beyond = valid & ((ids < 0) | (ids >= n_classes))
        if ids.is_cpu and not torch.compiler.is_compiling() and bool(beyond.any()):
            raise IndexError(f"teacher_ids must be in 0 .. {n_classes - 1}; got {int(ids[beyond][0])}")
        log_probs = log_probs.to(wide_dtype(log_probs.dtype)).masked_fill(beyond, torch.nan)
        ids, order = torch.where(valid, ids.clamp(0, n_classes - 1), n_classes).sort(dim=-1, stable=True)
        valid = valid.gather(-1, order)
        valid[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        log_probs = log_probs.gather(-1, order).masked_fill(~valid, -torch.inf)
        first = ids[:, :1].masked_fill(~valid[:, :1], 0)
        return cls(torch.where(valid, ids, first), log_probs, valid, valid.sum(-1, keepdim=True))

    def rows(self, part: slice) -> Listed:
        return Listed(*(rows_of(x, part) for x in self))

    def buckets(self, y: Tensor, rest: Tensor | None) -> tuple[Tensor, Tensor]:
        """The logits ``[n, k]`` or ``[n, k + 1]`` of student and teacher from the student's logits `y` of the ids and,
        with a bucket for the other classes, their log-sum-exp ``[n, 1]``. A token without any entry has equal ones."""
        student = y.masked_fill(~self.valid, -torch.inf)
        teacher = self.log_probs.to(y.dtype)
        if rest is None:
            none = self.counts == 0
            return student.masked_fill(none, 0.0), teacher.masked_fill(none, 0.0)
        tail = log_tail(teacher).masked_fill(rest == -torch.inf, -torch.inf)
        return torch.cat([student, rest], -1), torch.cat([teacher, tail], -1)


class TeacherLogits:
    """The logits of a chunk of tokens, without the tokens that `chunks.Tokens` leaves out."""

    def __init__(
        self, teacher: Teacher, target: Tensor, options: LinearKlDivOptions, n_classes: int, cpu: bool
    ) -> None:
        self.tokens: Tokens | None = None
        self.listed: Listed | None = None
        if teacher.hidden is not None:
            assert teacher.weight is not None
            inputs = Inputs(teacher.hidden, teacher.weight, target, teacher.bias)
            self.tokens = Tokens(inputs, options.of_teacher(), cpu)
            return
        counts = target.reshape(-1) != options.ignore_index
        kept = None
        if cpu and not torch.compiler.is_compiling() and not bool(counts.all()):
            kept = counts.nonzero().squeeze(1)
        if teacher.logits is None:
            assert teacher.ids is not None
            assert teacher.log_probs is not None
            listed = Listed.of(teacher.ids, teacher.log_probs, counts, n_classes)
            self.listed = listed if kept is None else Listed(*(x[kept] for x in listed))
            return
        self.rows, self.kept = teacher.logits.reshape(-1, teacher.logits.shape[-1]), kept

    def logits(self, part: slice) -> Tensor:
        """The logits of some tokens, valid until the next call."""
        if self.tokens is not None:
            return self.tokens.logits(part)
        return rows_of(self.rows, part) if self.kept is None else self.rows[rows_of(self.kept, part)]
