"""How `from_hf` maps the configuration of each family to `ModelConfig`, as data: see `Reading`.

Options and fields that several families share come first.
"""

from __future__ import annotations

import dataclasses

from foundry_kernels.integrations.convert.reading import (
    GATES,
    PLAIN,
    Reading,
    activation,
    deepseek_experts,
    experts,
    falcon,
    gemma,
    glm4_moe,
    granite,
    kimi_layers,
    latent,
    latent_rope,
    linear_layers,
    mixed_layers,
    opt,
    rope,
    window,
)
from foundry_kernels.integrations.families import FAMILIES, Family
from foundry_kernels.models.presets import FAMILIES as PRESETS

_GPT_OPTIONS = {
    "max_seq_len": "n_positions",
    "hidden_dim": "n_inner",
    "norm_eps": "layer_norm_epsilon",
    "embedding_dropout": "embd_pdrop",
    "residual_dropout": "resid_pdrop",
    "attention_dropout": "attn_pdrop",
}
_GPT_NEEDS = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
OPTIONS = {
    "n_kv_heads": "num_key_value_heads",
    "max_seq_len": "max_position_embeddings",
    "hidden_dim": "intermediate_size",
    "attention_dropout": "attention_dropout",
}
_QWEN_OPTIONS = {**OPTIONS, "head_dim": "head_dim", "norm_eps": "rms_norm_eps", "mlp_bias": "mlp_bias"}
LLAMA_OPTIONS = {**_QWEN_OPTIONS, "attention_bias": "attention_bias"}
_LLAMA_PARTS = rope, window, activation("hidden_act", GATES)
_ROUTED_OPTIONS = {"hidden_dim": "moe_intermediate_size", "router_renormalize": "norm_topk_prob"}

#: Options of a summary of all tokens, which language models do not compute.
_SUMMARY = frozenset(
    f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
)
#: The options from which transformers derives `sliding_window` and `layer_types`.
_WINDOWS = frozenset({"use_sliding_window", "max_window_layers"})
ROTATION = frozenset({"rope_parameters"})

GPT2 = Reading(
    _GPT_OPTIONS,
    (activation("activation_function", PLAIN),),
    choices=PRESETS["gpt2"],
    needs=_GPT_NEEDS,
    transposed=True,
    silent=_SUMMARY | {"reorder_and_upcast_attn"},
)
OPENAI = Reading(
    _GPT_OPTIONS,
    (activation("afn", {**PLAIN, "gelu": "gelu_tanh"}),),  # its "gelu" is the tanh approximation
    choices={**PRESETS["gpt2"], "norm_placement": "post"},
    needs=_GPT_NEEDS,
    transposed=True,
    silent=_SUMMARY,
)
GPT_NEOX = Reading(
    {
        **OPTIONS,
        "norm_eps": "layer_norm_eps",
        "attention_bias": "attention_bias",
        "parallel_residual": "use_parallel_residual",
        "embedding_dropout": "hidden_dropout",
        "residual_dropout": "hidden_dropout",
    },
    (rope, activation("hidden_act", PLAIN)),
    choices={"norm": "layer_norm", "mlp_bias": True},
    qkv="groups",
)
BLOOM = Reading(
    {
        "max_seq_len": "seq_length",
        "norm_eps": "layer_norm_epsilon",
        "residual_dropout": "hidden_dropout",
        "attention_dropout": "attention_dropout",
    },
    choices=PRESETS["bloom"],
    needs={"apply_residual_connection_post_layernorm": False},
    qkv="groups",
    silent=frozenset({"slow_but_exact"}),  # only affects rounding
)
FALCON = Reading(
    {
        "max_seq_len": "max_position_embeddings",
        "hidden_dim": "ffn_hidden_size",
        "norm_eps": "layer_norm_epsilon",
        "attention_bias": "bias",
        "mlp_bias": "bias",
        "residual_dropout": "hidden_dropout",
    },
    (falcon, activation("activation", PLAIN)),
    choices=PRESETS["falcon"],
    qkv="groups",
    # Each only applies to one of the two architectures; dropout of weights only with ALiBi, a rotation only without.
    silent=frozenset({"multi_query", "num_kv_heads", "num_ln_in_parallel_attn", "attention_dropout"}) | ROTATION,
)
OPT = Reading(
    {
        "init_std": "init_std",
        "max_seq_len": "max_position_embeddings",
        "hidden_dim": "ffn_dim",
        "attention_bias": "enable_bias",
        "mlp_bias": "enable_bias",
        "embedding_dropout": "dropout",
        "residual_dropout": "dropout",
        "attention_dropout": "attention_dropout",
    },
    (opt, activation("activation_function", PLAIN)),
    choices={"norm": "layer_norm", "positions": "learned"},
    needs={"_remove_final_layer_norm": False, "layerdrop": 0.0, "layer_norm_elementwise_affine": True},
    skipped_positions=2,
)
PHI = Reading(
    {
        **OPTIONS,
        "norm_eps": "layer_norm_eps",
        "embedding_dropout": "embd_pdrop",
        "residual_dropout": "resid_pdrop",
    },
    (rope, activation("hidden_act", PLAIN)),
    choices={
        "norm": "layer_norm",
        "attention_bias": True,
        "mlp_bias": True,
        "output_bias": True,
        "parallel_residual": True,
        "shared_attention_norm": True,
    },
    needs={"qk_layernorm": False},
)
STABLELM = Reading(
    {
        **OPTIONS,
        "norm_eps": "layer_norm_eps",
        "attention_bias": "use_qkv_bias",
        "parallel_residual": "use_parallel_residual",
        "shared_attention_norm": "use_parallel_residual",
    },
    (rope, activation("hidden_act", GATES)),
    choices={"norm": "layer_norm", "attention_out_bias": False},
    needs={"qk_layernorm": False, "hidden_dropout": 0.0},  # this dropout only applies to the feed-forward branch
)
STARCODER2 = Reading(
    {
        **OPTIONS,
        "norm_eps": "norm_epsilon",
        "attention_bias": "use_bias",
        "mlp_bias": "use_bias",
        "embedding_dropout": "embedding_dropout",
        "residual_dropout": "residual_dropout",
    },
    (rope, window, activation("hidden_act", PLAIN)),
    choices={"norm": "layer_norm"},
)
LLAMA = Reading(LLAMA_OPTIONS, _LLAMA_PARTS)
MIXTRAL = Reading(LLAMA_OPTIONS, (*_LLAMA_PARTS, experts("num_local_experts")), needs={"router_jitter_noise": 0.0})
QWEN2 = Reading(
    _QWEN_OPTIONS,
    _LLAMA_PARTS,
    choices={"attention_bias": True, "attention_out_bias": False},
    silent=_WINDOWS,
)
QWEN3 = Reading(LLAMA_OPTIONS, _LLAMA_PARTS, silent=_WINDOWS)
QWEN3_MOE = Reading(
    {**LLAMA_OPTIONS, **_ROUTED_OPTIONS},
    (*_LLAMA_PARTS, experts("num_experts"), mixed_layers),
    silent=_WINDOWS | {"intermediate_size"},  # the width of layers without experts
)
QWEN2_MOE = dataclasses.replace(
    QWEN3_MOE,
    options={
        **_QWEN_OPTIONS,
        **_ROUTED_OPTIONS,
        "attention_bias": "qkv_bias",
        "shared_expert_dim": "shared_expert_intermediate_size",
    },
    choices={"attention_out_bias": False, "shared_expert_gate": True},
)
OLMOE = Reading(
    {**LLAMA_OPTIONS, "router_renormalize": "norm_topk_prob"},
    (*_LLAMA_PARTS, experts("num_experts")),
    choices={"norm_round_before_weight": True, "qk_norm": True, "qk_norm_over": "projection"},
    needs={"clip_qkv": None},
)
GEMMA = Reading(
    LLAMA_OPTIONS,
    (*_LLAMA_PARTS, gemma),
    choices={"norm_weight_offset": 1.0},
    needs={"use_bidirectional_attention": None},
)
DOTS1 = Reading(
    {**LLAMA_OPTIONS, "hidden_dim": "moe_intermediate_size"},
    (*_LLAMA_PARTS, deepseek_experts),
    choices={"norm_round_before_weight": True, "qk_norm": True},
    silent=_WINDOWS | {"intermediate_size"},
)
GLM4_MOE = Reading(
    {**LLAMA_OPTIONS, "hidden_dim": "moe_intermediate_size"},
    (*_LLAMA_PARTS, deepseek_experts, glm4_moe),
    choices={"norm_round_before_weight": True, "attention_out_bias": False},
    # Another model predicts several tokens.
    silent=frozenset({"intermediate_size", "num_nextn_predict_layers"}),
)

_DELTA_OPTIONS = {
    "linear_v_heads": "linear_num_value_heads",
    "linear_k_heads": "linear_num_key_heads",
    "linear_k_dim": "linear_key_head_dim",
    "linear_v_dim": "linear_value_head_dim",
    "linear_conv_size": "linear_conv_kernel_dim",
}
_GATED_ATTENTION = {"norm_weight_offset": 1.0, "qk_norm_weight_offset": 1.0, "attention_gate": True}
SILU = activation("hidden_act", {"silu": "swiglu", "swish": "swiglu"})
QWEN3_5 = Reading({**LLAMA_OPTIONS, **_DELTA_OPTIONS}, (rope, linear_layers, SILU), choices=_GATED_ATTENTION)
QWEN3_NEXT = Reading(
    {
        **LLAMA_OPTIONS,
        **_DELTA_OPTIONS,
        **_ROUTED_OPTIONS,
        "shared_expert_dim": "shared_expert_intermediate_size",
    },
    (rope, linear_layers, SILU, experts("num_experts"), mixed_layers),
    choices={**_GATED_ATTENTION, "shared_expert_gate": True},
    silent=frozenset({"intermediate_size"}),  # the width of layers without experts
)

GRANITE = Reading(LLAMA_OPTIONS, (*_LLAMA_PARTS, granite))

_LATENT_OPTIONS = {
    **LLAMA_OPTIONS,
    "kv_lora_rank": "kv_lora_rank",
    "q_lora_rank": "q_lora_rank",
    "hidden_dim": "moe_intermediate_size",
}
#: The width of layers without experts, and a width that is the sum of two others.
_LATENT_SILENT = frozenset({"intermediate_size", "qk_head_dim", "head_dim"})
DEEPSEEK_V3 = Reading(
    _LATENT_OPTIONS,
    (latent_rope, SILU, deepseek_experts),
    choices={"norm_round_before_weight": True},
    # Another model predicts several tokens.
    silent=_LATENT_SILENT | {"num_nextn_predict_layers", "num_mtp_layers"},
)
KIMI_LINEAR = Reading(
    _LATENT_OPTIONS,
    (latent, kimi_layers, SILU, deepseek_experts),
    choices={"norm_round_before_weight": True, "positions": "none"},
    silent=_LATENT_SILENT,
)

_BY_FAMILY = {
    "gpt2": GPT2,
    "openai": OPENAI,
    "gpt_neox": GPT_NEOX,
    "bloom": BLOOM,
    "falcon": FALCON,
    "opt": OPT,
    "phi": PHI,
    "stablelm": STABLELM,
    "starcoder2": STARCODER2,
    "olmoe": OLMOE,
    "dots1": DOTS1,
    "glm4_moe": GLM4_MOE,
    "llama": LLAMA,
    "mistral": LLAMA,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen2_moe": QWEN2_MOE,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "gemma": GEMMA,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "granite": GRANITE,
}


def _with_norms(family: Family, reading: Reading) -> Reading:
    """The reading of a family with RMSNorms, with these norms' options."""
    if family.norm is None:
        return reading
    norms = {"norm_round_before_weight": family.norm == "llama", "qk_norm": family.head_norms}
    return dataclasses.replace(reading, choices={**norms, **reading.choices})


#: By the name of the language model's class.
READINGS = {
    FAMILIES[name].name + FAMILIES[name].head: _with_norms(FAMILIES[name], reading)
    for name, reading in _BY_FAMILY.items()
} | {
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "KimiLinearForCausalLM": KIMI_LINEAR,
}
