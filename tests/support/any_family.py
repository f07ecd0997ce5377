"""Small causal language models of any transformers family that can be built from sizes only; nothing is downloaded."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from tiny_hf import randomise
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from foundry_kernels.integrations.adapters.table import PATCHED
from foundry_kernels.integrations.families import text_type

#: The families without their own row, in this release of transformers.
WITHOUT_A_ROW = sorted(set(NAMES) - set(PATCHED) - set(map(text_type, PATCHED)))

#: The ones in every test run; the others are slow tests.
NAMED = (
    "afmoe",
    "biogpt",
    "cohere2",
    "deepseek_v32",
    "doge",
    "exaone4",
    "falcon_h1",
    "gemma4_text",
    "gpt_neo",
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
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_model": 64,
    "ffn_dim": 48,
    "n_positions": 64,
    "n_inner": 48,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "state_size": 8,
    "index_topk": 4,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 16,
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 32,
    "vocab_size_per_layer_input": 61,
    "hidden_size_per_layer_input": 8,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 16,
}
_CONV = ["conv", "full_attention"]
_LINEAR = ["linear_attention", "full_attention"]
_MAMBA = ["mamba", "attention"]
_SLIDING = ["sliding_attention", "full_attention"]
#: Additional options of families.
EXTRA: dict[str, dict[str, Any]] = {
    "afmoe": {"layer_types": _SLIDING},
    "bailing_hybrid": {"layer_types": _LINEAR},
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"rotary_dim": 16},
    "cohere2": {"layer_types": _SLIDING},
    "exaone4": {"layer_types": _SLIDING},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 16},
    "granitemoehybrid": {"layer_types": _MAMBA},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR},
    "lfm2": {"layer_types": _CONV},
    "lfm2_moe": {"layer_types": _CONV},
    "lfm3": {"layer_types": _CONV},
    "llama4_text": {"attention_chunk_size": 4},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1},
    "minimax": {"layer_types": _LINEAR},
    "qwen3_5_moe_text": {"layer_types": _LINEAR, **LINEAR},
    "qwen3_5_text": {"layer_types": _LINEAR, **LINEAR},
    "qwen3_next": {"layer_types": _LINEAR, **LINEAR},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 64, "attention_window_size": 6},
    "xlnet": {"d_head": 16},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "layer_types": ["mamba", "hybrid"], "num_mem_blocks": 1},
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_text": {  # two of the layers have no keys of their own
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8,
    },
}
#: Options that some families must not have.
UNFIT = ((), ("head_dim",), ("head_dim", "num_key_value_heads"), ("q_lora_rank",))


def any_family(family: str) -> Any:
    """Returns a float32 model of two layers with random weights in eval mode, or None if sizes are not enough for a
    model that runs."""
    kind = CONFIG_MAPPING[family]
    known = {f.name for f in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set(SIZES)
    known |= kind.attribute_map.keys()
    for unfit in UNFIT:
        sizes = {k: v for k, v in SIZES.items() if k in known and k not in unfit}
        try:
            config = kind(**{**sizes, **EXTRA.get(family, {})})
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                if sum(p.numel() for p in on_meta(config).parameters()) > 5_000_000:
                    continue
                model = randomise(AutoModelForCausalLM.from_config(config))
            with torch.no_grad():
                model(torch.arange(3, 21)[None])  # the sizes may not fit together
            return model
        except Exception:
            continue
    return None


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)
