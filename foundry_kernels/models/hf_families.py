"""The families of transformers that `Transformer.from_hf` reads: one row each.

A row says which fields of ours the configuration means, with a refusal of what has no meaning here, and how weights are
called and laid out.
"""

from __future__ import annotations

from typing import Any

from foundry_kernels.models.hf_config import (
    GATED,
    PLAIN,
    Family,
    activation_of,
    llama,
    rope_fields,
    sizes,
    window_fields,
    without,
)

# --- configurations ---------------------------------------------------------------------------------------------------


def _gpt(config: Any) -> dict[str, Any]:
    without(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    activation = "activation_function" if hasattr(config, "activation_function") else "afn"
    # "gelu" of the first GPT is the approximation by tanh.
    known = PLAIN if activation == "activation_function" else {**PLAIN, "gelu": "gelu_tanh"}
    return {
        **sizes(config),
        "max_seq_len": config.n_positions,
        "hidden_dim": getattr(config, "n_inner", None),
        "norm_eps": config.layer_norm_epsilon,
        "norm": "layer_norm",
        "positions": "learned",
        "activation": activation_of(config, activation, known),
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_dropout": config.embd_pdrop,
        "residual_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
    }


def _bloom(config: Any) -> dict[str, Any]:
    without(config, apply_residual_connection_post_layernorm=False)
    return {
        **sizes(config),
        "max_seq_len": getattr(config, "seq_length", 2048),
        "norm_eps": config.layer_norm_epsilon,
        "norm": "layer_norm",
        "positions": "alibi",
        "embedding_norm": True,
        "activation": "gelu_tanh",
        "attention_bias": True,
        "mlp_bias": True,
        "residual_dropout": config.hidden_dropout,
        "attention_dropout": config.attention_dropout,
    }


def _falcon(config: Any) -> dict[str, Any]:
    if config.alibi:
        raise ValueError("alibi must be False: Falcon's slopes are rounded to bfloat16 and scaled with the scores")
    grouped, parallel = config.new_decoder_architecture, config.parallel_attn
    if grouped:
        without(config, parallel_attn=True)
        kv_heads = config.num_kv_heads
    else:
        kv_heads = 1 if config.multi_query else config.num_attention_heads
    if parallel:
        without(config, hidden_dropout=0.0)  # of the sum of the branches, not of each
    else:
        without(config, attention_dropout=config.hidden_dropout)  # which it applies to the residual
    two = not parallel or (grouped and config.num_ln_in_parallel_attn in (None, 2))
    return {
        **sizes(config),
        "n_kv_heads": kv_heads,
        "max_seq_len": config.max_position_embeddings,
        "hidden_dim": config.ffn_hidden_size,
        "norm_eps": config.layer_norm_epsilon,
        "norm": "layer_norm",
        "activation": activation_of(config, "activation", PLAIN),
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "parallel_residual": parallel,
        "shared_attention_norm": not two,
        "residual_dropout": config.hidden_dropout,
        **rope_fields(config),
    }


def _layer_norm_and_rope(config: Any, **others: Any) -> dict[str, Any]:
    return {
        **sizes(config),
        "n_kv_heads": getattr(config, "num_key_value_heads", None),
        "max_seq_len": config.max_position_embeddings,
        "hidden_dim": config.intermediate_size,
        "norm": "layer_norm",
        "attention_dropout": config.attention_dropout,
        **rope_fields(config),
        **others,
    }


def _gpt_neox(config: Any) -> dict[str, Any]:
    return _layer_norm_and_rope(
        config,
        norm_eps=config.layer_norm_eps,
        activation=activation_of(config, "hidden_act", PLAIN),
        attention_bias=config.attention_bias,
        mlp_bias=True,
        parallel_residual=config.use_parallel_residual,
        embedding_dropout=config.hidden_dropout,
        residual_dropout=config.hidden_dropout,
    )


def _phi(config: Any) -> dict[str, Any]:
    without(config, qk_layernorm=False)
    return _layer_norm_and_rope(
        config,
        norm_eps=config.layer_norm_eps,
        activation=activation_of(config, "hidden_act", PLAIN),
        attention_bias=True,
        mlp_bias=True,
        output_bias=True,
        parallel_residual=True,
        shared_attention_norm=True,
        embedding_dropout=config.embd_pdrop,
        residual_dropout=config.resid_pdrop,
    )


def _stablelm(config: Any) -> dict[str, Any]:
    without(config, qk_layernorm=False)
    without(config, hidden_dropout=0.0)  # of the feed-forward branch alone
    return _layer_norm_and_rope(
        config,
        norm_eps=config.layer_norm_eps,
        activation=activation_of(config, "hidden_act", GATED),
        attention_bias=config.use_qkv_bias,
        attention_out_bias=False,
        parallel_residual=config.use_parallel_residual,
        shared_attention_norm=config.use_parallel_residual,
    )


def _starcoder2(config: Any) -> dict[str, Any]:
    return _layer_norm_and_rope(
        config,
        norm_eps=config.norm_epsilon,
        activation=activation_of(config, "hidden_act", PLAIN),
        attention_bias=config.use_bias,
        mlp_bias=config.use_bias,
        embedding_dropout=config.embedding_dropout,
        residual_dropout=config.residual_dropout,
        **window_fields(config),
    )


def _opt(config: Any) -> dict[str, Any]:
    without(config, word_embed_proj_dim=config.hidden_size, _remove_final_layer_norm=False, layerdrop=0.0)
    without(config, layer_norm_elementwise_affine=True)
    return {
        **sizes(config),
        "init_std": config.init_std,
        "max_seq_len": config.max_position_embeddings,
        "hidden_dim": config.ffn_dim,
        "norm": "layer_norm",
        "norm_placement": "pre" if config.do_layer_norm_before else "post",
        "positions": "learned",
        "activation": activation_of(config, "activation_function", PLAIN),
        "attention_bias": config.enable_bias,
        "mlp_bias": config.enable_bias,
        "embedding_dropout": config.dropout,
        "residual_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
    }


def _qwen2(config: Any) -> dict[str, Any]:
    return {**llama(config), "attention_bias": True, "attention_out_bias": False}


def _qwen3(config: Any) -> dict[str, Any]:
    return {**llama(config), "qk_norm": True}


def _experts(config: Any, n_experts: int) -> dict[str, Any]:
    """The routers' loss is a part of theirs where they are asked for their logits."""
    coef = config.router_aux_loss_coef
    return {
        "n_experts": n_experts,
        "top_k": config.num_experts_per_tok,
        "load_balancing_coef": coef if config.output_router_logits else 0.0,
    }


def _mixtral(config: Any) -> dict[str, Any]:
    without(config, router_jitter_noise=0.0)
    return {**llama(config), **_experts(config, config.num_local_experts)}


def _qwen_moe(config: Any) -> dict[str, Any]:
    without(config, decoder_sparse_step=1, mlp_only_layers=[])
    return {
        **_experts(config, config.num_experts),
        "hidden_dim": config.moe_intermediate_size,
        "router_renormalize": config.norm_topk_prob,
    }


def _qwen2_moe(config: Any) -> dict[str, Any]:
    shared = {"shared_expert_dim": config.shared_expert_intermediate_size, "shared_expert_gate": True}
    bias = {"attention_bias": config.qkv_bias, "attention_out_bias": False}
    return {**llama(config), **_qwen_moe(config), **shared, **bias}


def _qwen3_moe(config: Any) -> dict[str, Any]:
    return {**_qwen3(config), **_qwen_moe(config)}


# --- names ------------------------------------------------------------------------------------------------------------

_SEPARATE = {f"attention.w{x}": f"self_attn.{x}_proj" for x in "qkv"}
_GATE = {f"feed_forward.w{n}": f"mlp.{x}_proj" for n, x in ((1, "gate"), (2, "down"), (3, "up"))}
_HEAD = {"output": "lm_head"}
_MODEL = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", **_HEAD}
_NORMS = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_DENSE = {"feed_forward.w1": "mlp.dense_h_to_4h", "feed_forward.w2": "mlp.dense_4h_to_h"}
_CONV = {
    "attention_norm": "ln_1",
    "attention.wqkv": "attn.c_attn",
    "attention.wo": "attn.c_proj",
    "ffn_norm": "ln_2",
    "feed_forward.w1": "mlp.c_fc",
    "feed_forward.w2": "mlp.c_proj",
}
_LLAMA = {**_MODEL, **_NORMS, **_SEPARATE, "attention.wo": "self_attn.o_proj", **_GATE}
_FUSED = {"attention.wqkv": "self_attention.query_key_value", "attention.wo": "self_attention.dense", **_DENSE}
_FALCON = {"tok_embeddings": "transformer.word_embeddings", "norm": "transformer.ln_f", **_HEAD, **_FUSED}
_QK_NORM = {f"attention.{x}_norm": f"self_attn.{x}_norm" for x in "qk"}
_ROUTED = {f"feed_forward.experts.{x}_proj": f"mlp.experts.{x}_proj" for x in ("gate_up", "down")}
_EXPERTS = {name: theirs for name, theirs in _LLAMA.items() if name not in _GATE}
_EXPERTS |= {"feed_forward.router": "mlp.gate", **_ROUTED}
_SHARED = {ours.replace(".", ".shared."): theirs.replace(".", ".shared_expert.") for ours, theirs in _GATE.items()}
_SHARED |= {"feed_forward.shared_gate": "mlp.shared_expert_gate"}

#: Of a summary of all tokens, which a language model does not make.
_SUMMARY = frozenset(
    f"summary_{name}" for name in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")
)
#: What transformers makes `sliding_window` and `layer_types` of.
_WINDOWS = frozenset({"use_sliding_window", "max_window_layers"})

FAMILIES = {
    "GPT2LMHeadModel": Family(
        _gpt,
        "transformer.h",
        {
            "tok_embeddings": "transformer.wte",
            "pos_embeddings": "transformer.wpe",
            "norm": "transformer.ln_f",
            **_HEAD,
            **_CONV,
        },
        transposed=True,
        silent=_SUMMARY | {"reorder_and_upcast_attn"},
    ),
    "OpenAIGPTLMHeadModel": Family(
        lambda config: {**_gpt(config), "norm_placement": "post"},
        "transformer.h",
        {
            "tok_embeddings": "transformer.tokens_embed",
            "pos_embeddings": "transformer.positions_embed",
            **_HEAD,
            **_CONV,
        },
        transposed=True,
        silent=_SUMMARY,
    ),
    "LlamaForCausalLM": Family(llama, "model.layers", _LLAMA),
    "MistralForCausalLM": Family(llama, "model.layers", _LLAMA),
    "Qwen2ForCausalLM": Family(_qwen2, "model.layers", _LLAMA, silent=_WINDOWS),
    "Qwen3ForCausalLM": Family(_qwen3, "model.layers", {**_LLAMA, **_QK_NORM}, silent=_WINDOWS),
    "MixtralForCausalLM": Family(_mixtral, "model.layers", _EXPERTS),
    "Qwen2MoeForCausalLM": Family(_qwen2_moe, "model.layers", {**_EXPERTS, **_SHARED}, silent=_WINDOWS),
    "Qwen3MoeForCausalLM": Family(_qwen3_moe, "model.layers", {**_EXPERTS, **_QK_NORM}, silent=_WINDOWS),
    "BloomForCausalLM": Family(
        _bloom,
        "transformer.h",
        {**_FALCON, **_NORMS, "embedding_norm": "transformer.word_embeddings_layernorm"},
        qkv="groups",
        silent=frozenset({"slow_but_exact"}),  # a matter of rounding
    ),
    "FalconForCausalLM": Family(
        _falcon,
        "transformer.h",
        {
            **_FALCON,
            "attention_norm": ("input_layernorm", "ln_attn"),
            "ffn_norm": ("post_attention_layernorm", "ln_mlp"),
        },
        qkv="groups",
        # Each counts in one of the two architectures alone, and dropout of weights with ALiBi alone.
        silent=frozenset({"multi_query", "num_kv_heads", "num_ln_in_parallel_attn", "attention_dropout"}),
    ),
    "GPTNeoXForCausalLM": Family(
        _gpt_neox,
        "gpt_neox.layers",
        {
            "tok_embeddings": "gpt_neox.embed_in",
            "norm": "gpt_neox.final_layer_norm",
            "output": "lm_head",
            **_NORMS,
            "attention.wqkv": "attention.query_key_value",
            "attention.wo": "attention.dense",
            **_DENSE,
        },
        qkv="groups",
    ),
    "OPTForCausalLM": Family(
        _opt,
        "model.decoder.layers",
        {
            "tok_embeddings": "model.decoder.embed_tokens",
            "pos_embeddings": "model.decoder.embed_positions",
            "norm": "model.decoder.final_layer_norm",
            **_HEAD,
            "attention_norm": "self_attn_layer_norm",
            **_SEPARATE,
            "attention.wo": "self_attn.out_proj",
            "ffn_norm": "final_layer_norm",
            "feed_forward.w1": "fc1",
            "feed_forward.w2": "fc2",
        },
        skipped_positions=2,
    ),
    "PhiForCausalLM": Family(
        _phi,
        "model.layers",
        {
            **_MODEL,
            "norm": "model.final_layernorm",
            "attention_norm": "input_layernorm",
            **_SEPARATE,
            "attention.wo": "self_attn.dense",
            "feed_forward.w1": "mlp.fc1",
            "feed_forward.w2": "mlp.fc2",
        },
    ),
    "StableLmForCausalLM": Family(_stablelm, "model.layers", _LLAMA),
    "Starcoder2ForCausalLM": Family(
        _starcoder2,
        "model.layers",
        {
            **_MODEL,
            **_NORMS,
            **_SEPARATE,
            "attention.wo": "self_attn.o_proj",
            "feed_forward.w1": "mlp.c_fc",
            "feed_forward.w2": "mlp.c_proj",
        },
    ),
}
