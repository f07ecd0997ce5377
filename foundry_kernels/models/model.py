"""What the functions of this folder use of a model, whose class is above them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.models.blocks import Norm
from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.call import Call, Positions
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.hybrid_cache import HybridCache
from foundry_kernels.nn import RelativeBias, SinusoidalEmbedding
from foundry_kernels.nn._head import matrix_of
from foundry_kernels.nn._linear_layers import layers_for


class SequenceShard(Protocol):
    """This process's part of each sequence, as `fk.distributed.context_parallel` shards them."""

    def check(self, call: Call, config: ModelConfig, weight: Tensor) -> None:
        """Raises an error if the tokens are not a shard of a sequence that fits the model, or if the call has an
        argument that is not sharded. weight: the embedding's."""

    def positions(self, call: Call) -> Positions:
        """The positions of the tokens, and the `cu_seqlens` for the layers."""

    def mean(self, total: Tensor, count: Tensor) -> Tensor:
        """The mean over the counted tokens of all processes. total, count: this process's sum and number of tokens."""


class Model(nn.Module):
    """The base of :class:`Transformer`, which makes these parts and calls them."""

    config: ModelConfig
    backends: dict[str, str]
    tok_embeddings: nn.Embedding
    pos_embeddings: nn.Embedding | SinusoidalEmbedding | None
    type_embeddings: nn.Embedding | None
    embedding_norm: Norm | None
    relative_bias: RelativeBias | None
    layers: nn.ModuleList
    output: nn.Linear | None
    sequence_shard: SequenceShard | None
    _head_backend: str

    def make_cache(self, batch_size: int, max_len: int | None = None) -> KVCache:
        """Returns an empty cache on the model's device, in the dtype of its keys (autocast's dtype, under autocast)."""
        weight, kind = self.tok_embeddings.weight, HybridCache if self.config.linear_layers else KVCache
        return kind(self.config, batch_size, max_len, device=weight.device, dtype=self._key_dtype())

    def _key_dtype(self) -> torch.dtype:
        weight = self.tok_embeddings.weight
        return autocast_dtype(weight) or weight.dtype

    def _head(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of the head, or None if `output` must be called."""
        return (self.tok_embeddings.weight, None) if self.output is None else matrix_of(self.output)

    def _logits(self, y: Tensor) -> Tensor:
        layers, head = layers_for(y, self._head_backend), self.output
        if not self.config.head:
            return y
        return layers.product(y, self.tok_embeddings.weight) if head is None else layers.linear(y, head)
