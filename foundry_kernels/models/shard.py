"""The interface for sharding a model's sequences over processes, which `fk.distributed.context_parallel` implements."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from foundry_kernels.models.call import Call, Positions
from foundry_kernels.models.config import ModelConfig


class SequenceShard(Protocol):
    """This process's part of each sequence."""

    def check(self, call: Call, config: ModelConfig, weight: Tensor) -> None:
        """Raises an error if the tokens are not a shard of a sequence that fits the model, or if the call has an
        argument that is not sharded. weight: the embedding's."""

    def positions(self, call: Call) -> Positions:
        """The positions of the tokens, and the `cu_seqlens` for the layers."""

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean over the counted tokens of all processes. total, count: this process's sum and number of tokens."""
