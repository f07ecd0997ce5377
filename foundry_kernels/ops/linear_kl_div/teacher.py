"""The teacher's side of a call: constants, of which a chunk's logits are made or taken at a time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foundry_kernels.ops._linear_loss.chunks import Tokens, rows_of
from foundry_kernels.ops._linear_loss.problem import Inputs, Problem


class Teacher(NamedTuple):
    """Hidden states, a weight and perhaps a bias; or logits."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    logits: Tensor | None

    def detached(self) -> Teacher:
        return Teacher(*(None if x is None else x.detach() for x in self))


class TeacherLogits:
    """The logits of a chunk of tokens, without the tokens that `chunks.Tokens` leaves out."""

    def __init__(self, teacher: Teacher, target: Tensor, options: Problem, cpu: bool) -> None:
        self.tokens: Tokens | None = None
        if teacher.logits is None:
            assert teacher.hidden is not None
            assert teacher.weight is not None
            inputs = Inputs(teacher.hidden, teacher.weight, target, teacher.bias)
            self.tokens = Tokens(inputs, options, cpu)
            return
        self.rows = teacher.logits.reshape(-1, teacher.logits.shape[-1])
        counts = target.reshape(-1) != options.ignore_index
        self.kept = None
        if cpu and not torch.compiler.is_compiling() and not bool(counts.all()):
            self.kept = counts.nonzero().squeeze(1)

    def logits(self, part: slice) -> Tensor:
        """The logits of some tokens, valid until the next call."""
        if self.tokens is not None:
            return self.tokens.logits(part)
        return rows_of(self.rows, part) if self.kept is None else self.rows[rows_of(self.kept, part)]
