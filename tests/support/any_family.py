"""Small causal language models of any transformers family that can be built from sizes only; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from models import tiny
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

from foundry_kernels.integrations.adapters.table import PATCHED
from foundry_kernels.integrations.families import text_type

#: The families without their own row, in this release of transformers.
WITHOUT_A_ROW = sorted(set(NAMES) - set(PATCHED) - set(map(text_type, PATCHED)))

#: The ones in every test run; the others are slow tests.
NAMED = (
    "afmoe", "biogpt", "cohere2", "deepseek_v32", "doge", "exaone4", "falcon_h1", "gemma4_text", "gpt_neo",
    "lfm2", "llama4_text", "minimax", "nemotron", "opt", "phi", "qwen3_5_text", "qwen3_next", "stablelm",
)  # fmt: skip

#: Options that the defaults lack. Two of Gemma 4's layers have no keys of their own; DeepSeek's indexer chooses all
#: tokens, its router all experts, so that none comes and goes with the last bit.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v32": {"index_topk": 64, "num_experts_per_tok": 4},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
    },
}


def any_family(family: str) -> Any:
    """Returns a float32 model of few layers with random weights in eval mode, or None if this release has none that
    runs."""
    try:
        model = tiny(NAMES[family], **CHANGES.get(family, {}))
        with torch.no_grad():
            model(torch.arange(3, 21)[None])
    except Exception:
        return None
    return model
