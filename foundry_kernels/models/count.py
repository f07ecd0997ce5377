"""How many parameters a model has, by its configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foundry_kernels.models.config import ModelConfig


def count_parameters(config: ModelConfig) -> int:
    """Parameters of the model, those of a tied head once."""
    dim, norm = config.dim, config.dim * (2 if config.norms_have_bias else 1)
    norms = 1 if config.shared_attention_norm else 2
    layers = config.n_layers * (_attention(config, dim) + norm * norms)
    if config.context_dim is not None:
        layers += config.n_layers * (_attention(config, config.context_dim) + norm)
    sparse = config.n_layers - len(config.dense_layers)
    layers += sparse * _feed_forward(config)
    layers += len(config.dense_layers) * _block(config, config.dense_hidden_dim or config.ffn_width)
    matrices = 1 + (config.head and not config.tie_embeddings)
    embeddings = config.vocab_size * (dim * matrices + config.output_bias) + dim * config.token_types
    embeddings += config.max_seq_len * dim * (config.positions == "learned") + norm * config.embedding_norm
    embeddings += config.relative_buckets * config.n_heads * config.relative
    return embeddings + layers + norm * config.ends_with_norm


def _attention(config: ModelConfig, source: int) -> int:
    """source: the width of what keys and values are made of."""
    q, kv = config.n_heads * config.head_width, config.kv_heads * config.head_width
    weights = 2 * config.dim * q + 2 * source * kv
    biases = (q + 2 * kv) * config.attention_bias + config.dim * config.attention_out_has_bias
    over = 2 * config.head_width if config.qk_norm_over == "head" else q + kv
    return weights + biases + over * config.qk_norm


def _block(config: ModelConfig, width: int) -> int:
    """A feed-forward block."""
    matrices = 3 if config.gated else 2
    return matrices * config.dim * width + ((matrices - 1) * width + config.dim) * config.mlp_bias


def _feed_forward(config: ModelConfig) -> int:
    if config.n_experts is None:
        return _block(config, config.ffn_width)
    shared = config.shared_expert_dim
    count = config.n_experts * (_block(config, config.ffn_width) + config.dim + config.router_bias)
    count += 0 if shared is None else _block(config, shared)
    return count + config.dim * config.shared_expert_gate
