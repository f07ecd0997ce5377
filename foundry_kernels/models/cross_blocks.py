"""Blocks that also attend to a context, between self-attention and feed-forward; and the choice of a model's block
class."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foundry_kernels.models.blocks import (
    HybridBlock,
    LinearBlock,
    ParallelBlock,
    Passed,
    PostNormBlock,
    TransformerBlock,
    make_attention,
    make_norm,
)
from foundry_kernels.models.call import Positions
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.nn import AlibiSlopes, ContextKeyValues, KeyValueStore, RotaryEmbedding
from foundry_kernels.nn._paged import PagedKeyValues
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask


class CrossBlock(TransformerBlock):
    """A norm before each of the three branches. Adds `cross_norm` and `cross_attention`."""

    def __init__(
        self,
        config: ModelConfig,
        rope: RotaryEmbedding | None,
        alibi: AlibiSlopes | None,
        factory: dict[str, Any],
        layer: int,
    ) -> None:
        super().__init__(config, rope, alibi, factory, layer)
        self.cross_norm = make_norm(config, factory)
        self.cross_attention = make_attention(config, factory, None, None, context_dim=config.context_dim)

    def forward(  # type: ignore[override]
        self,
        branch: Tensor | None,
        stream: Tensor,
        cache: KeyValueStore | PagedKeyValues | None,
        return_stats: bool,
        attn_mask: Tensor | AttentionMask | None,
        positions: Positions | None,
        context: Tensor | ContextKeyValues,
        context_mask: AttentionMask | None,
    ) -> Passed:
        """Computes :class:`TransformerBlock`'s block with a context and its mask."""
        y, stream = self._add(self.attention_norm, branch, stream)
        branch = self._attend(y, cache, attn_mask, positions)
        y, stream = self._add(self.cross_norm, branch, stream)
        branch = self.cross_attention(y, context=context, attn_mask=context_mask)
        y, stream = self._add(self.ffn_norm, branch, stream)
        branch, *stats = self._feed(y, return_stats)
        return branch, stream, *stats


class PostNormCrossBlock(CrossBlock):
    """A norm of each of the three sums; every branch is added within the block."""

    def forward(  # type: ignore[override]
        self,
        branch: Tensor | None,
        stream: Tensor,
        cache: KeyValueStore | PagedKeyValues | None,
        return_stats: bool,
        attn_mask: Tensor | AttentionMask | None,
        positions: Positions | None,
        context: Tensor | ContextKeyValues,
        context_mask: AttentionMask | None,
    ) -> Passed:
        branch = self._attend(stream, cache, attn_mask, positions)
        stream, _ = self._add(self.attention_norm, branch, stream)
        branch = self.cross_attention(stream, context=context, attn_mask=context_mask)
        stream, _ = self._add(self.cross_norm, branch, stream)
        branch, *stats = self._feed(stream, return_stats)
        stream, _ = self._add(self.ffn_norm, branch, stream)
        return None, stream, *stats


def block_class(config: ModelConfig, layer: int = 0) -> type[TransformerBlock]:
    """The class of a layer; all have the same `drops_late`."""
    if layer in config.linear_layers:
        return HybridBlock if layer in config.full_layers else LinearBlock
    if config.norm_placement == "post":
        return PostNormBlock if config.context_dim is None else PostNormCrossBlock
    if config.context_dim is not None:
        return CrossBlock
    return ParallelBlock if config.parallel_residual else TransformerBlock
