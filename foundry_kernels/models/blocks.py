"""The blocks of a model, one class for each way in which norms and branches follow each other.

A block gets a stream and the branch that is still to be added to it, and returns the same two, so that the sum is made
in the pass of the next norm.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.models.config import ModelConfig
from foundry_kernels.nn import (
    MLP,
    AlibiSlopes,
    Attention,
    GatedMLP,
    KeyValueStore,
    LayerNorm,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
)
from foundry_kernels.nn.mlp import ACTIVATIONS, GATES

Norm = RMSNorm | LayerNorm


def operations(config: ModelConfig) -> tuple[str, ...]:
    """The operations that a model calls."""
    ops = [config.norm, f"add_{config.norm}"]
    if config.qk_norm:
        ops.append("qk_norm_rope" if config.positions == "rope" else "rms_norm")
    elif config.positions == "rope":
        ops.append("rope")
    op = (GATES if config.gated else ACTIVATIONS)[config.activation][0]
    ops += [] if op is None else [op]
    return tuple(dict.fromkeys((*ops, "flash_attention", "cross_entropy", "linear_cross_entropy")))


def make_norm(config: ModelConfig, factory: dict[str, Any]) -> Norm:
    if config.norm == "layer_norm":
        return LayerNorm(config.dim, config.norm_eps, bias=config.norms_have_bias, **factory)
    return RMSNorm(config.dim, config.norm_eps, round_before_weight=config.norm_round_before_weight, **factory)


def make_feed_forward(config: ModelConfig, factory: dict[str, Any]) -> GatedMLP | MLP:
    if config.activation == "swiglu" and not config.mlp_bias:
        return SwiGLU(config.dim, config.ffn_width, **factory)
    block = GatedMLP if config.gated else MLP
    return block(config.dim, config.ffn_width, activation=config.activation, bias=config.mlp_bias, **factory)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after a norm that also adds the branch before it to the residual stream."""

    def __init__(
        self,
        config: ModelConfig,
        rope: RotaryEmbedding | None,
        alibi: AlibiSlopes | None,
        factory: dict[str, Any],
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, factory)
        self.attention = Attention(
            config.dim,
            config.n_heads,
            config.n_kv_heads,
            config.head_width,
            rope=rope,
            alibi=alibi,
            sliding_window=config.sliding_window,
            bias=config.attention_bias,
            out_bias=config.attention_out_has_bias,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            norm_round_before_weight=config.norm_round_before_weight,
            dropout=config.attention_dropout,
            **factory,
        )
        self.ffn_norm = None if config.shared_attention_norm else make_norm(config, factory)
        self.feed_forward = make_feed_forward(config, factory)
        self.dropout = config.residual_dropout

    def forward(
        self, branch: Tensor | None, stream: Tensor, cache: KeyValueStore | None = None
    ) -> tuple[Tensor | None, Tensor]:
        """`branch`, the previous block's output (None before the first), is still to be added to `stream`; both
        ``[B, T, dim]``. Returns this block's branch, and the stream that it is to be added to."""
        if branch is None:
            y = self.attention_norm(stream)
        else:
            y, stream = self.attention_norm(branch.to(stream.dtype), stream)
        branch = self.attention(y, cache=cache)
        if self.dropout:
            branch = self._drop(branch)
        y, stream = self.ffn_norm(branch.to(stream.dtype), stream)  # type: ignore[misc]
        branch = self.feed_forward(y)
        return (self._drop(branch) if self.dropout else branch), stream

    def _drop(self, branch: Tensor) -> Tensor:
        return F.dropout(branch, self.dropout, self.training)

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}" if self.dropout else ""


class ParallelBlock(TransformerBlock):
    """Attention and feed-forward of the same stream, after one norm (Falcon-7B) or one each (GPT-NeoX).

    Black et al., "GPT-NeoX-20B", 2022, arXiv:2204.06745.
    """

    def forward(
        self, branch: Tensor | None, stream: Tensor, cache: KeyValueStore | None = None
    ) -> tuple[Tensor | None, Tensor]:
        if branch is None:
            y = self.attention_norm(stream)
        else:
            y, stream = self.attention_norm(branch.to(stream.dtype), stream)
        attended = self.attention(y, cache=cache)
        fed = self.feed_forward(y if self.ffn_norm is None else self.ffn_norm(stream))
        if self.dropout:
            attended, fed = self._drop(attended), self._drop(fed)
        return attended + fed, stream


class PostNormBlock(TransformerBlock):
    """Attention and feed-forward, each before a norm of the sum; no branch is left to be added."""

    def forward(
        self, branch: Tensor | None, stream: Tensor, cache: KeyValueStore | None = None
    ) -> tuple[Tensor | None, Tensor]:
        branch = self.attention(stream, cache=cache)
        stream, _ = self.attention_norm(self._drop(branch).to(stream.dtype), stream)
        branch = self.feed_forward(stream)
        stream, _ = self.ffn_norm(self._drop(branch).to(stream.dtype), stream)  # type: ignore[misc]
        return None, stream


def block_class(config: ModelConfig) -> type[TransformerBlock]:
    if config.norm_placement == "post":
        return PostNormBlock
    return ParallelBlock if config.parallel_residual else TransformerBlock
