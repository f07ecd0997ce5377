"""The interface for sharding a model's sequences over processes, which `fk.distributed.context_parallel` implements."""

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
        """Raises an error if the tokens are not a shard of a sequence that fits the model, or if an argument in `given`
        is not None."""

    def seen(self, tokens: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The positions of the tokens, and the `cu_seqlens` for the layers."""

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean over the counted tokens of all processes. total, count: this process's sum and number of tokens."""
