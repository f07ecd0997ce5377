"""Very small models, and tokens for them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.models import ModelConfig, Transformer

TINY = ModelConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=11, max_seq_len=24, norm_eps=1e-5)

#: The differences to a Llama. Each value of each choice is in at least one model.
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "learned", "norm": "layer_norm", "activation": "gelu_tanh", "attention_bias": True}
    | {"mlp_bias": True, "tie_embeddings": True, "init": "depth_scaled"},
    "bloom": {"positions": "alibi", "norm": "layer_norm", "embedding_norm": True, "activation": "gelu_tanh"}
    | {"attention_bias": True, "mlp_bias": True, "n_heads": 6, "dim": 24, "n_kv_heads": None},
    "falcon": {"norm": "layer_norm", "activation": "gelu", "n_kv_heads": 1}
    | {"parallel_residual": True, "shared_attention_norm": True, "tie_embeddings": True},
    "neox": {"norm": "layer_norm", "activation": "relu2", "parallel_residual": True, "residual_scale": 0.5}
    | {"rope_dim": 2, "attention_bias": True, "mlp_bias": True, "output_bias": True, "init": "xavier"},
    "vaswani": {
        "positions": "sinusoidal",
        "norm": "layer_norm",
        "norm_placement": "post",
        "activation": "relu",
        "residual_scale": 0.6,
    }
    | {"mlp_bias": True},
    "post-rms": {"positions": "none", "norm_placement": "post", "activation": "geglu", "mlp_bias": True},
    "qk-norm": {"qk_norm": True, "sliding_window": 3, "head_dim": 6}
    | {"gate_alpha": 1.7, "branch_scales": (0.7, 1.0, 1.3)},
    "qk-norm-alibi": {"qk_norm": True, "positions": "alibi", "sliding_window": 4, "activation": "geglu_tanh"},
    "no-bias": {
        "norm": "layer_norm",
        "norm_bias": False,
        "activation": "silu",
        "rope_dim": 2,
        "rope_interleaved": True,
    },
    "experts": {"n_experts": 5, "top_k": 3, "router_scoring": "sigmoid", "router_scale": 1.5, "hidden_dim": 6}
    | {"router_bias": True, "selection_bias": True, "mlp_bias": True}
    | {"shared_expert_dim": 4, "shared_expert_gate": True},
    "t5": {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 6, "attention_scale": 1.0}
    | {"logit_scale": 0.25, "activation": "relu", "tie_embeddings": True, "embedding_scale": 1.5},
    "groups": {"n_experts": 6, "top_k": 2, "router_groups": 3, "router_top_groups": 2, "hidden_dim": 6}
    | {"dense_layers": (0,), "dense_hidden_dim": 10, "selection_bias": True, "router_scoring": "sigmoid"}
    | {"qk_norm": True, "qk_norm_over": "projection", "norm_weight_offset": 0.5}
    | {"activation": "glu"},
    "falcon-rw": {"positions": "alibi", "alibi_scaled": True, "norm": "layer_norm", "n_heads": 6, "dim": 24}
    | {"n_kv_heads": None, "activation": "gelu", "norm_placement": "post", "final_norm": True},
    "qkv-bias": {"attention_bias": True, "attention_out_bias": False, "ffn_rule": "4d", "sliding_window": 1}
    | {"activation": "reglu", "residual_scale": 1.5},
}

KINDS = ("linear_attention", "full_attention", "linear_attention")
HYBRID = dataclasses.replace(TINY, n_layers=3, layer_types=KINDS)
#: Models with linear attention in some layers, and one with a gate of attention alone.
HYBRIDS: dict[str, ModelConfig] = {
    "defaults": HYBRID,
    "qwen": dataclasses.replace(
        HYBRID, attention_gate=True, qk_norm=True, qk_norm_weight_offset=1.0, norm_weight_offset=1.0, rope_dim=2,
        linear_v_heads=6, linear_k_heads=3, linear_k_dim=5, linear_v_dim=7, linear_conv_size=3,
    ),
    "kimi": dataclasses.replace(
        HYBRID, linear_kind="kimi_delta", linear_v_heads=6, linear_k_heads=3, linear_k_dim=5, linear_v_dim=7,
        linear_conv_size=3,
    ),
    "mamba2": dataclasses.replace(
        HYBRID, linear_kind="mamba2", linear_v_heads=6, linear_k_heads=2, linear_k_dim=5, linear_v_dim=7,
        linear_conv_size=3, linear_bias=True, linear_dt_limit=(0.1, 2.0),
    ),
    "nemotron": dataclasses.replace(
        TINY, n_layers=4, layer_types=("linear_attention", "mlp", "full_attention", "linear_attention"),
        one_branch=True, linear_kind="mamba2", activation="relu2", positions="none", residual_scale=0.7,
        n_experts=3, hidden_dim=6, shared_expert_dim=4, linear_norm_groups=1,
    ),
    "falcon-h1": dataclasses.replace(
        TINY, layer_types=("hybrid", "full_attention"), linear_kind="mamba2", linear_k_heads=2, gate_alpha=0.7,
        branch_scales=(0.7, 1.3, 0.8), linear_in_scales=(0.9, 1.1, 1.2, 0.7, 1.3), linear_norm_before_gate=True,
    ),
    "latent": dataclasses.replace(
        HYBRID, linear_kind="kimi_delta", n_kv_heads=None, head_dim=6, positions="none", rope_dim=2, kv_lora_rank=5,
        v_head_dim=7,
    ),
    "only linear": dataclasses.replace(TINY, layer_types=["linear_attention"] * 2, positions="none"),
    "experts": dataclasses.replace(HYBRID, n_experts=3, hidden_dim=6, dense_layers=(0,), shared_expert_dim=4),
    "latent, rotated": dataclasses.replace(
        TINY, n_kv_heads=None, head_dim=6, rope_dim=4, rope_interleaved=True, kv_lora_rank=5, q_lora_rank=7,
        v_head_dim=3, attention_bias=True, attention_out_bias=False, sliding_window=4,
    ),
    "gates alone": dataclasses.replace(TINY, attention_gate=True, attention_bias=True),
    "alibi": dataclasses.replace(HYBRID, positions="alibi", sliding_window=3, residual_dropout=0.1),
}  # fmt: skip


def config(name: str, **changes: Any) -> ModelConfig:
    return dataclasses.replace(TINY, **{**MODELS[name], **changes})


#: All of them.
EVERY = {name: config(name) for name in MODELS} | {f"hybrid, {name}": of for name, of in HYBRIDS.items()}


def make(config: ModelConfig = TINY, backend: str = "reference", **options) -> Transformer:
    """A model in which every parameter matters: weights are wide enough, and norms differ from 1."""
    model = Transformer(config, backend, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(values * 0.3 + (1.0 if parameter.dim() == 1 else 0.0))
    return model


def draw(batch: int = 3, length: int = 7, seed: int = 0) -> Tensor:
    return torch.randint(TINY.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))
