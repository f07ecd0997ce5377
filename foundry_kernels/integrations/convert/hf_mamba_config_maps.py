"""How `from_hf` maps the configurations of models with Mamba-2's layers to `ModelConfig`; see `Reading`."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn

from foundry_kernels.integrations.convert.hf_config_maps import LLAMA_OPTIONS, OPTIONS, ROTATION, SILU
from foundry_kernels.integrations.convert.reading import (
    PLAIN,
    Reading,
    activation,
    experts,
    granite,
    linear_layers,
    rope,
    routed_by_sigmoids,
    without,
)


def of_layer(model: Any) -> dict[str, Any]:
    """What a layer of Mamba-2 has that depends on the release."""
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            values = module.num_heads * module.head_dim
            groups = values // getattr(module.norm, "group_size", values)
            return {"linear_dt_limit": module.time_step_limit, "linear_norm_groups": groups}
    return {}


def of_bamba(model: Any) -> dict[str, Any]:
    """Earlier releases rotate whole heads."""
    return {**of_layer(model), "rope_dim": 2 * len(model.model.rotary_emb.inv_freq)}


def of_nemotron(model: nn.Module) -> dict[str, Any]:
    found = of_layer(model)
    config: Any = model.config
    return {**found, "linear_dt_limit": (config.time_step_min, None)} if found else {}


def of_falcon_h1(model: nn.Module) -> dict[str, Any]:
    return {"linear_dt_limit": of_layer(model)["linear_dt_limit"]}


def norm_order(config: Any) -> dict[str, Any]:
    return {} if config.mamba_rms_norm else {"linear_norm_before_gate": False}


def granite_hybrid(config: Any) -> dict[str, Any]:
    """Granite 4: experts beside a shared one, or this one alone."""
    fields = {"positions": "none"} if config.position_embedding_type != "rope" else rope(config)
    if config.num_local_experts:
        return fields | experts("num_local_experts")(config) | {"shared_expert_dim": config.shared_intermediate_size}
    return fields | {"hidden_dim": config.shared_intermediate_size}


def nemotron_experts(config: Any) -> dict[str, Any]:
    """Experts without a gate in "moe" layers, and a feed-forward block in "mlp" layers."""
    if "moe" not in config.layers_block_type:
        return {}
    without(config, moe_latent_size=None)
    dense = tuple(layer for layer, kind in enumerate(config.layers_block_type) if kind == "mlp")
    return {
        **routed_by_sigmoids(config),
        "shared_expert_dim": config.moe_shared_expert_intermediate_size,
        "dense_layers": dense,
        "dense_hidden_dim": config.intermediate_size if dense else None,
    }


def falcon_h1(config: Any) -> dict[str, Any]:
    """Falcon-H1's factors, some of which become one: that on what attention reads is in its scores and its result, and
    ``silu(m g)`` is m times ``g * sigmoid(m g)``."""
    reads, (gate, down) = config.attention_in_multiplier, config.mlp_multipliers
    without(config, projectors_bias=config.mamba_proj_bias)
    for factor, bias in (("attention_in_multiplier", "attention_bias"), ("ssm_in_multiplier", "mamba_proj_bias")):
        if getattr(config, bias):
            without(config, **{factor: 1.0})
    if config.mlp_bias:
        without(config, mlp_multipliers=[1.0, down])
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "layer_types": ("hybrid",) * config.num_hidden_layers,
        "embedding_scale": config.embedding_multiplier,
        "logit_scale": config.lm_head_multiplier,
        "attention_scale": width**-0.5 * config.key_multiplier * reads**2,
        "branch_scales": (reads * config.attention_out_multiplier, config.ssm_out_multiplier, gate * down),
        "gate_alpha": gate,
        "linear_in_scales": tuple(config.ssm_in_multiplier * factor for factor in config.ssm_multipliers),
    }


#: Only in the initial weights, or in rounding; limits of the step are read from the layer.
_STEPS = frozenset({"expand", "chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "num_logits_to_keep"})
_STEPS |= {f"time_step_{name}" for name in ("limit", "rank", "min", "max", "floor")}

BAMBA = Reading(
    {
        **LLAMA_OPTIONS,
        "linear_v_heads": "mamba_n_heads",
        "linear_k_heads": "mamba_n_groups",
        "linear_k_dim": "mamba_d_state",
        "linear_v_dim": "mamba_d_head",
        "linear_conv_size": "mamba_d_conv",
        "linear_bias": "mamba_proj_bias",
        "linear_conv_bias": "mamba_conv_bias",
    },
    (rope, linear_layers, SILU),
    choices={"linear_kind": "mamba2", "norm_round_before_weight": True},
    needs={"z_loss_coefficient": 0.0},
    of_model=of_bamba,
    silent=_STEPS | {"mamba_expand", "mamba_chunk_size", "attn_layer_indices", "partial_rotary_factor"},
)
GRANITE_HYBRID = dataclasses.replace(
    BAMBA,
    parts=(linear_layers, SILU, granite, granite_hybrid),
    needs={},
    of_model=of_layer,
    silent=BAMBA.silent | ROTATION | {"num_experts_per_tok", "router_aux_loss_coef"},  # in models without experts
)
FALCON_H1 = dataclasses.replace(
    BAMBA,
    options={
        **BAMBA.options,
        "linear_rmsnorm": "mamba_rms_norm",
        "linear_norm_before_gate": "mamba_norm_before_gate",
    },
    parts=(rope, SILU, falcon_h1, norm_order),
    needs={},
    of_model=of_falcon_h1,
    silent=BAMBA.silent | {"mamba_d_ssm"},
)
_MIXER = {
    "linear_k_heads": "n_groups",
    "linear_conv_size": "conv_kernel",
    "linear_bias": "use_bias",
    "linear_conv_bias": "use_conv_bias",
    "norm_eps": "layer_norm_epsilon",
    "head_dim": "head_dim",
}
_ONE_BRANCH = {"linear_kind": "mamba2", "positions": "none", "one_branch": True}
MAMBA2 = Reading(
    {
        **_MIXER,
        "n_heads": "num_heads",
        "linear_v_heads": "num_heads",
        "linear_v_dim": "head_dim",
        "linear_k_dim": "state_size",
    },
    (linear_layers, SILU),
    choices={**_ONE_BRANCH, "norm_round_before_weight": True},
    needs={"rms_norm": True},
    of_model=of_layer,
    silent=_STEPS,
)
NEMOTRON_H = Reading(
    {
        **OPTIONS,
        **_MIXER,
        "mlp_bias": "mlp_bias",
        "linear_v_heads": "mamba_num_heads",
        "linear_v_dim": "mamba_head_dim",
        "linear_k_dim": "ssm_state_size",
    },
    (linear_layers, nemotron_experts, activation("mlp_hidden_act", PLAIN)),
    choices=_ONE_BRANCH,
    needs={"mamba_hidden_act": "silu", "sliding_window": None, "num_nextn_predict_layers": 0},
    of_model=of_nemotron,
    silent=_STEPS
    # Of experts, in models without them, and what its layers do not read.
    | {"n_routed_experts", "num_experts_per_tok", "norm_topk_prob", "routed_scaling_factor", "n_group", "topk_group"}
    | {f"moe_{name}" for name in ("intermediate_size", "latent_size", "shared_expert_intermediate_size")}
    | {"moe_shared_expert_overlap", "n_shared_experts", "hidden_dropout", "attention_bias", "mamba_proj_bias"}
    | {"use_mamba_kernels", "mamba_ssm_cache_dtype", "mtp_layers_block_type"},
)

#: By the name of the language model's class.
MAMBA = {
    "BambaForCausalLM": BAMBA,
    "FalconH1ForCausalLM": FALCON_H1,
    "GraniteMoeHybridForCausalLM": GRANITE_HYBRID,
    "Mamba2ForCausalLM": MAMBA2,
    "NemotronHForCausalLM": NEMOTRON_H,
}
