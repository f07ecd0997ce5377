"""The options of one call of linear_kl_div, made and checked in the public function and read by every backend."""

from __future__ import annotations

from foundry_kernels.core.options import Options
from foundry_kernels.ops.kl_div.options import KlDivOptions
from foundry_kernels.ops.log_probs.options import LogProbsOptions


class LinearKlDivOptions(Options, not_in_schema=("return_entropy",), schema_types={"ignore_index": "int"}):
    ignore_index: int
    temperature: float
    direction: str  # as in KlDivOptions
    beta: float
    reduction: str
    logit_scale: float
    softcap: float | None
    teacher_logit_scale: float
    teacher_softcap: float | None
    add_tail: bool
    chunk_size: int | None  # as for linear_cross_entropy, but never tiles
    batch_invariant: bool
    return_entropy: bool = False

    def results(self) -> tuple[str, ...]:
        return "loss", *("entropy",) * self.return_entropy

    def of_teacher(self) -> LinearKlDivOptions:
        """What makes the teacher's logits as these options make the student's."""
        return self._replace(logit_scale=self.teacher_logit_scale, softcap=self.teacher_softcap)

    def of_logits(self) -> KlDivOptions:
        """The options for logits that exist, scaled."""
        return KlDivOptions(
            self.ignore_index, self.temperature, self.direction, self.beta, self.softcap, self.teacher_softcap
        )

    def of_buckets(self) -> KlDivOptions:
        """The options for logits that are capped, over the temperature."""
        return KlDivOptions(self.ignore_index, 1.0, self.direction, self.beta, None, None)

    def of_student(self) -> LogProbsOptions:
        """The student's distribution: the cap is before the temperature, which is the same as a lower cap behind it."""
        cap = None if self.softcap is None else self.softcap / self.temperature
        return LogProbsOptions(-100, 1.0 / self.temperature, cap)
