"""What the engine in `_linear_loss` needs to know of a divergence: a kernel gets a chunk's logits of student and
teacher, and makes the losses and, over the student's logits, their gradient in one go.

So a reduced loss takes one matmul for the teacher and three for the student. With reduction "none" the gradients of the
losses are known later: the backward pass does the same again, with these. There are no blocks of classes, as a
divergence needs the normalizers of both sides.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foundry_kernels.ops._linear_loss.problem import GRADIENTS, Chunk, Inputs, Loss, RowKernel
from foundry_kernels.ops.kl_div.options import KlDivOptions
from foundry_kernels.ops.linear_kl_div.options import LinearKlDivOptions
from foundry_kernels.ops.linear_kl_div.teacher import Teacher, TeacherLogits

LOSS = Loss(
    "linear_kl_div",
    LinearKlDivOptions,
    outputs=("loss", *GRADIENTS),
    constants=tuple(f"teacher_{name}" for name in Teacher._fields),
    reduced=("loss",),
    logits=2,
    tiles=False,
)


class KlDivRows(RowKernel):
    """The divergences of logits that exist. A backend computes `rows`."""

    def __init__(self, inputs: Inputs, constants: tuple[Tensor | None, ...], options: Any) -> None:
        super().__init__(inputs, constants, options)
        self.teacher = TeacherLogits(Teacher(*constants), inputs.target, options, self.cpu)

    def rows(
        self, logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions, dloss: Tensor | None
    ) -> Tensor:
        """Each token's loss; with `dloss`, the gradient of each token's loss, the logits' own gradient is written over
        them."""
        raise NotImplementedError

    def forward(self, chunk: Chunk, wanted: frozenset[str], dloss: Tensor | None) -> dict[str, Tensor]:
        part, logits, target = chunk
        return {"loss": self.rows(logits, self.teacher.logits(part), target, self.options.of_logits(), dloss)}

    def gradients_(self, chunk: Chunk, dloss: Tensor, saved: tuple[Tensor, ...], first: int) -> None:
        self.forward(chunk, frozenset(), dloss)
