"""What a model asks of whoever divides its sequences over processes: `fk.distributed.context_parallel`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from foundry_kernels.models.config import ModelConfig


class SequenceShard(Protocol):
    """This process's part of each sequence."""

    def check(
        self,
        tokens: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        config: ModelConfig,
        weight: Tensor,
        given: Mapping[str, Any],
    ) -> None:
        """Refuses tokens that are no part of a sequence which fits the model, and what of `given` is given."""

    def seen(self, tokens: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The positions of the tokens, and `cu_seqlens` as the layers are to get them."""

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean over the tokens that count in all processes, of this process's sum and number."""
