"""The blocks of a model: one class for each order of norms and branches.

A block takes the residual stream and the previous branch, which has not been added to it yet, and returns the same two.
The sum and the dropout of the branch are fused into the next norm. With `return_stats` a block also returns the
router's statistics as separate tensors, and a mask is a separate argument, because reentrant activation checkpointing
gives no gradient to nested tensors.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.models.call import Positions
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.decode_block import decode
from foundry_kernels.models.hybrid_cache import LayerState
from foundry_kernels.models.mixers import MIXERS, make_mixer
from foundry_kernels.models.state_slots import PagedState
from foundry_kernels.nn import (
    MLP,
    AlibiSlopes,
    Attention,
    GatedMLP,
    KeyValueStore,
    LatentAttention,
    LayerNorm,
    MoE,
    RMSNorm,
    RotaryEmbedding,
    SwiGLU,
)
from foundry_kernels.nn._paged import PagedKeyValues
from foundry_kernels.nn.mlp import ACTIVATIONS, GATES
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask

Norm = RMSNorm | LayerNorm
Passed = tuple[Any, ...]  # (branch, stream), or (branch, stream, shares, probabilities, z)


def operations(config: ModelConfig) -> tuple[str, ...]:
    """Returns the operations that a model calls."""
    ops = [config.norm, f"add_{config.norm}"]
    fused = config.positions == "rope" and config.qk_norm_over == "head"
    if config.qk_norm:
        ops.append("qk_norm_rope" if fused else "rms_norm")
    if config.positions == "rope" and not (config.qk_norm and fused):
        ops.append("rope")
    ops.append((GATES if config.gated else ACTIVATIONS)[config.activation][0])
    ops += ["glu"] if config.attention_gate else []
    ops += [] if config.kv_lora_rank is None else ["rms_norm"]
    ops += MIXERS[config.linear_kind].OPS if config.linear_layers else ()
    ops += [] if config.n_experts is None else ["grouped_mm", "combine_experts"]
    return tuple(dict.fromkeys((*ops, "flash_attention", "cross_entropy", "linear_cross_entropy")))


def make_norm(config: ModelConfig, factory: dict[str, Any]) -> Norm:
    if config.norm == "layer_norm":
        eps: dict[str, Any] = {} if config.norm_eps is None else {"eps": config.norm_eps}
        return LayerNorm(config.dim, **eps, bias=config.norms_have_bias, **factory)
    order, offset = config.norm_round_before_weight, config.norm_weight_offset
    return RMSNorm(config.dim, config.norm_eps, round_before_weight=order, weight_offset=offset, **factory)


def make_attention(
    config: ModelConfig, factory: dict[str, Any], rope: RotaryEmbedding | None, alibi: AlibiSlopes | None, **others: Any
) -> Attention | LatentAttention:
    options: dict[str, Any] = {
        "rope": rope,
        "alibi": alibi,
        "bias": config.attention_bias,
        "out_bias": config.attention_out_has_bias,
        "scale": config.attention_scale,
        "norm_round_before_weight": config.norm_round_before_weight,
        "dropout": config.attention_dropout,
        **others,
        **factory,
    }
    if config.kv_lora_rank is not None:
        shared = config.rotary_width
        widths = {"qk_rope_head_dim": shared, "qk_nope_head_dim": config.head_width - shared}
        options |= {**widths, "v_head_dim": config.value_width}
        return LatentAttention(config.dim, config.n_heads, config.kv_lora_rank, config.q_lora_rank, **options)
    return Attention(
        config.dim,
        config.n_heads,
        config.n_kv_heads,
        config.head_width,
        qk_norm=config.qk_norm,
        qk_norm_over=config.qk_norm_over,
        norm_eps=config.norm_eps,
        norm_weight_offset=config.qk_norm_weight_offset,
        output_gate=config.attention_gate,
        **options,
    )


def make_feed_forward(config: ModelConfig, factory: dict[str, Any], layer: int) -> GatedMLP | MLP | MoE:
    width = config.ffn_width
    if layer in config.dense_layers:
        width = config.dense_hidden_dim or width
    elif config.n_experts is not None:
        return MoE(
            config.dim,
            width,
            config.n_experts,
            config.top_k,
            activation=config.activation,
            scoring=config.router_scoring,
            renormalize=config.router_renormalize,
            scale=config.router_scale,
            router_bias=config.router_bias,
            selection_bias=config.selection_bias,
            n_groups=config.router_groups,
            top_groups=config.router_top_groups,
            bias=config.mlp_bias,
            weight_inputs=config.weight_expert_inputs,
            shared_width=config.shared_expert_dim,
            shared_gate=config.shared_expert_gate,
            dropout=config.activation_dropout,
            **factory,
        )
    if config.gate_alpha != 1.0:
        bias, dropout = config.mlp_bias, config.activation_dropout
        alpha = {"alpha": config.gate_alpha}
        return GatedMLP(config.dim, width, bias=bias, dropout=dropout, gate_options=alpha, **factory)
    if config.activation == "swiglu" and not config.mlp_bias and not config.activation_dropout:
        return SwiGLU(config.dim, width, **factory)
    block = GatedMLP if config.gated else MLP
    options: dict[str, Any] = {
        "activation": config.activation,
        "bias": config.mlp_bias,
        "dropout": config.activation_dropout,
    }
    return block(config.dim, width, **options, **factory)


def add_branch(norm: Norm, branch: Tensor, stream: Tensor, dropout: float, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Returns the norm of stream + dropout(scale * branch), and this sum. Dropout is only applied in training."""
    branch = branch.to(stream.dtype) if scale == 1.0 else (branch * scale).to(stream.dtype)
    return norm(branch, stream, dropout_p=dropout) if dropout and norm.training else norm(branch, stream)


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each after a norm that also adds the previous branch to the residual stream."""

    # None in a block without this branch.
    attention_norm: Any
    attention: Any
    ffn_norm: Any
    feed_forward: Any

    drops_late: ClassVar = True  # whether the caller applies dropout to the returned branch

    def __init__(
        self,
        config: ModelConfig,
        rope: RotaryEmbedding | None,
        alibi: AlibiSlopes | None,
        factory: dict[str, Any],
        layer: int,
    ) -> None:
        super().__init__()
        self.attention_norm = self.attention = self.ffn_norm = self.feed_forward = None
        feeds = layer in config.mlp_layers
        if not (feeds and config.one_branch):
            self.attention_norm = make_norm(config, factory)
            self.attention = self._make_attention(config, factory, rope, alibi)
        if feeds:
            self.ffn_norm = None if config.shared_attention_norm else make_norm(config, factory)
            self.feed_forward = make_feed_forward(config, factory, layer)
        self.routes = feeds and config.n_experts is not None and layer not in config.dense_layers
        self.dropout, self.residual_scale = config.residual_dropout, config.residual_scale
        self.branch_scales = config.branch_scales
        self.scaled = config.residual_scale != 1.0 or config.branch_scales != (1.0,) * 3

    def _make_attention(
        self, config: ModelConfig, factory: dict[str, Any], rope: RotaryEmbedding | None, alibi: AlibiSlopes | None
    ) -> Any:
        window = config.sliding_window
        return make_attention(config, factory, rope, alibi, causal=config.causal, sliding_window=window)

    def forward(
        self,
        branch: Tensor | None,
        stream: Tensor,
        cache: KeyValueStore | PagedKeyValues | None = None,
        return_stats: bool = False,
        attn_mask: Tensor | AttentionMask | None = None,
        positions: Positions | None = None,
    ) -> Passed:
        """`branch`, the previous block's output (None before the first block), has not been added to `stream` yet; both
        are ``[B, T, dim]``. Returns this block's branch, the stream to which it must be added, and with `return_stats`
        the three tensors of :class:`foundry_kernels.nn.RouterStats` if there is a router. If the block `drops_late`,
        dropout is applied to a branch when it is added. `attn_mask` and `positions` are for its attention."""
        if type(self) is TransformerBlock and cache is not None and attn_mask is None and positions is None:
            decoded = decode(self, branch, stream, cache)
            if decoded is not None:
                return decoded
        if self.attention is not None:
            y, stream = self._add(self.attention_norm, branch, stream)
            branch = self._attend(y, cache, attn_mask, positions)
        if self.feed_forward is None:
            return branch, stream
        y, stream = self._add(self.ffn_norm, branch, stream)
        branch, *stats = self._feed(y, return_stats)
        return branch, stream, *stats

    def _add(self, norm: Any, branch: Tensor | None, stream: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the norm of the stream with the branch, if there is one, and this stream."""
        if branch is None:
            return norm(stream), stream
        return add_branch(norm, branch, stream, self.dropout if self.drops_late else 0.0, self.residual_scale)

    def _attend(
        self,
        y: Tensor,
        cache: KeyValueStore | PagedKeyValues | None,
        attn_mask: Tensor | AttentionMask | None,
        positions: Positions | None,
    ) -> Tensor:
        if positions is not None:
            found: Tensor = self.attention(y, **positions._asdict())
        elif attn_mask is not None:
            found = self.attention(y, cache=cache, attn_mask=attn_mask)
        else:
            found = self.attention(y, cache=cache)
        return _times(found, self.branch_scales[0])

    def _feed(self, y: Tensor, return_stats: bool) -> tuple[Tensor, ...]:
        if not (return_stats and self.routes):
            return (_times(self.feed_forward(y), self.branch_scales[2]),)
        branch, stats = self.feed_forward(y, return_stats=True)
        return _times(branch, self.branch_scales[2]), *stats

    def extra_repr(self) -> str:
        return f"dropout={self.dropout}" if self.dropout else ""


class LinearBlock(TransformerBlock):
    """Linear attention in the place of attention. It takes no mask: only `lengths` reach it, whose padding comes after
    all tokens that count."""

    def _make_attention(
        self, config: ModelConfig, factory: dict[str, Any], rope: RotaryEmbedding | None, alibi: AlibiSlopes | None
    ) -> Any:
        return make_mixer(config, **factory)

    def _attend(  # type: ignore[override]
        self,
        y: Tensor,
        cache: LayerState | PagedState | None,
        attn_mask: Tensor | AttentionMask | None,
        positions: Positions | None,
    ) -> Tensor:
        return _times(_read(self.attention, y, cache, positions), self.branch_scales[1])


class HybridBlock(TransformerBlock):
    """The sum of attention and linear attention, which read the same, in the place of attention (Falcon-H1)."""

    def __init__(self, config: ModelConfig, rope: Any, alibi: Any, factory: dict[str, Any], layer: int) -> None:
        super().__init__(config, rope, alibi, factory, layer)
        self.mixer = make_mixer(config, **factory)

    def _attend(
        self, y: Tensor, cache: Any, attn_mask: Tensor | AttentionMask | None, positions: Positions | None
    ) -> Tensor:
        keys, state = (None, None) if cache is None else cache
        found = super()._attend(y, keys, attn_mask, positions)
        return found + _times(_read(self.mixer, y, state, positions), self.branch_scales[1])


def _read(mixer: Any, y: Tensor, cache: LayerState | PagedState | None, positions: Positions | None) -> Tensor:
    """Returns linear attention of y, which continues the cache's sequences."""
    if cache is not None:
        return cache.read(mixer, y)
    found: Tensor = mixer(y, cu_seqlens=None if positions is None else positions.cu_seqlens)
    return found


def _times(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


class ParallelBlock(TransformerBlock):
    """Attention and feed-forward of the same stream, after one norm (Falcon-7B) or one each (GPT-NeoX). Dropout is
    applied to each branch before their sum.

    Black et al., "GPT-NeoX-20B", 2022, arXiv:2204.06745.
    """

    drops_late = False

    def forward(
        self,
        branch: Tensor | None,
        stream: Tensor,
        cache: KeyValueStore | PagedKeyValues | None = None,
        return_stats: bool = False,
        attn_mask: Tensor | AttentionMask | None = None,
        positions: Positions | None = None,
    ) -> Passed:
        y, stream = self._add(self.attention_norm, branch, stream)
        attended = self._attend(y, cache, attn_mask, positions)
        fed, *stats = self._feed(y if self.ffn_norm is None else self.ffn_norm(stream), return_stats)
        if self.dropout:
            attended, fed = (F.dropout(each, self.dropout, self.training) for each in (attended, fed))
        return attended + fed, stream, *stats


class PostNormBlock(TransformerBlock):
    """Attention and feed-forward, each followed by a norm of the sum; every branch is added within the block."""

    def forward(
        self,
        branch: Tensor | None,
        stream: Tensor,
        cache: KeyValueStore | PagedKeyValues | None = None,
        return_stats: bool = False,
        attn_mask: Tensor | AttentionMask | None = None,
        positions: Positions | None = None,
    ) -> Passed:
        branch = self._attend(stream, cache, attn_mask, positions)
        stream, _ = self._add(self.attention_norm, branch, stream)
        branch, *stats = self._feed(stream, return_stats)
        stream, _ = self._add(self.ffn_norm, branch, stream)
        return None, stream, *stats
