"""A small model of each family that `patch` knows, built from its configuration: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch

from foundry_kernels.integrations.adapters.table import PATCHED
from foundry_kernels.integrations.families import text_type

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

LINEAR = {
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}

#: What a family needs besides, so that what makes it different is seen at this size.
EXTRA: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 6},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    "qwen2_moe": {
        **ROUTED,
        "shared_expert_intermediate_size": 32,
        "use_sliding_window": True,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {**ROUTED, "head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0},
    "gemma3": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "phi3": {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "olmo3": {"sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "glm4": {"head_dim": 16},
    "qwen3_next": {**LINEAR, **ROUTED, "shared_expert_intermediate_size": 32, "mlp_only_layers": [0]},
    "qwen3_5": LINEAR,
    "qwen3_5_moe": {**LINEAR, **ROUTED, "shared_expert_intermediate_size": 32},
    "olmo_hybrid": {**LINEAR, "linear_allow_neg_eigval": True},
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gpt_neox": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
}


def tiny_config(family: str, **changes: Any) -> Any:
    """Returns a configuration of `family` of two layers and width 64.

    Raises:
        ImportError: transformers is not installed. ValueError: `family` is not in the table.
    """
    if family not in PATCHED:
        raise ValueError(f"family must be one of {', '.join(PATCHED)}; got {family!r}")
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[text_type(family)](**{**SIZES, **EXTRA.get(family, {}), **changes})


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """Returns a model of `tiny_config`, in eval mode. Norm weights and sinks are random: 0 or 1 would hide much."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(family, **changes)).to(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif "embed" not in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.15)
    return model.to(dtype).eval()
