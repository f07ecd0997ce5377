"""Small causal language models of any transformers family that can be built from sizes only; nothing is downloaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tiny_hf import randomise
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from foundry_kernels.integrations.families import text_type
from foundry_kernels.integrations.table import PATCHED

#: The families without their own row, in this release of transformers.
WITHOUT_A_ROW = sorted(set(NAMES) - set(PATCHED) - set(map(text_type, PATCHED)))

#: The ones in every test run; the others are slow tests.
NAMED = (
    "afmoe",
    "biogpt",
    "cohere2",
    "doge",
    "exaone4",
    "falcon_h1",
    "gemma4_text",
    "lfm2",
    "llama4_text",
    "minimax",
    "nemotron",
    "opt",
    "phi",
    "qwen3_5_text",
    "qwen3_next",
    "stablelm",
)

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "sliding_window": 6,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
#: Additional options of families.
EXTRA: dict[str, dict[str, Any]] = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"], **LINEAR},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], **LINEAR},
    "llama4_text": {"attention_chunk_size": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "minimax": {"layer_types": ["linear_attention", "full_attention"]},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
    "gemma4_text": {  # two of the layers have no keys of their own
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
    },
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"]},
    "afmoe": {"layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention"]},
}


def any_family(family: str) -> Any:
    """Returns a float32 model of two layers with random weights in eval mode, or None if sizes are not enough for a
    model that runs."""
    kind = CONFIG_MAPPING[family]
    known = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(SIZES)
    try:
        config = kind(**{k: v for k, v in {**SIZES, **EXTRA.get(family, {})}.items() if k in known or k in EXTRA})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            if sum(p.numel() for p in on_meta(config).parameters()) > 2_000_000:
                return None
            model = randomise(AutoModelForCausalLM.from_config(config))
        with torch.no_grad():
            model(torch.arange(3, 21)[None])  # the sizes may not fit together
        return model
    except Exception:
        return None


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
