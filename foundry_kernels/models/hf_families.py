"""The families of transformers that `Transformer.from_hf` reads: one row each.

A row says which fields of ours the configuration means, with a refusal of what has no meaning here, and how weights are
called and laid out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foundry_kernels.ops.rope import RopeScaling

_PLAIN = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu"
}  # fmt: skip
_GATED = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh"
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How a class of transformers is read.

    Attributes:
        fields: from its configuration, the fields of ours.
        layers: what the names of a layer begin with, but for its number.
        names: our modules and theirs, several where models differ. Ours may be `attention.wqkv`, which is split.
        qkv: how queries, keys and values lie in one matrix: "columns", one behind the other, or "groups", for each
            key-value head its queries, the key and the value.
        transposed: matrices are ``[in, out]`` (`Conv1D`).
        skipped_positions: rows of the table of positions before that of position 0.
    """

    fields: Callable[[Any], dict[str, Any]]
    layers: str
    names: Mapping[str, str | tuple[str, ...]]
    qkv: str = "columns"
    transposed: bool = False
    skipped_positions: int = 0


# --- configurations ---------------------------------------------------------------------------------------------------


def _without(config: Any, **values: Any) -> None:
    """Raise ValueError where an option has another value than the one that this model has."""
    for name, value in values.items():
        got = getattr(config, name, value)
        if got != value:
            raise ValueError(f"{name} must be {value!r}: Transformer does not have this option; got {got!r}")


def _activation(config: Any, name: str, known: dict[str, str]) -> str:
    got = getattr(config, name)
    if got not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {got!r}")
    return known[got]


def _rope(config: Any) -> dict[str, Any]:
    given = dict(getattr(config, "rope_parameters", None) or {})
    kind = given.pop("rope_type", "default")
    base, part = given.pop("rope_theta", None), given.pop("partial_rotary_factor", None)
    if kind not in ("default", "linear", "yarn", "llama3") or base is None:
        raise ValueError(
            "rope_parameters must be of type default, linear, yarn or llama3, and the same in all layers; "
            f"got {getattr(config, 'rope_parameters', None)}"
        )
    fields: dict[str, Any] = {"rope_base": float(base), "rope_interleaved": False}
    if kind != "default":
        if kind == "yarn":
            given.setdefault("original_max_position_embeddings", config.max_position_embeddings)
        if unknown := sorted(given.keys() - RopeScaling.__dataclass_fields__.keys()):
            raise ValueError(f"rope_parameters must not hold {', '.join(unknown)}, which no RopeScaling has")
        fields["rope_scaling"] = RopeScaling(rope_type=kind, **given)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if part is not None and int(width * part) != width:
        fields["rope_dim"] = int(width * part)
    return fields


def _window(config: Any) -> dict[str, Any]:
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if len(kinds) > 1:
        raise ValueError(f"layer_types must be one for all layers; got {', '.join(sorted(kinds))}")
    return {"sliding_window": None if kinds == {"full_attention"} else window}


def _sizes(config: Any) -> dict[str, Any]:
    return {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "init_std": getattr(config, "initializer_range", 0.02),
    }


def _llama(config: Any) -> dict[str, Any]:
    bias = bool(getattr(config, "attention_bias", False))
    return {
        **_sizes(config),
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None),
        "max_seq_len": config.max_position_embeddings,
        "hidden_dim": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
        "norm_round_before_weight": True,
        "activation": _activation(config, "hidden_act", _GATED),
        "attention_bias": bias,
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "attention_dropout": config.attention_dropout,
        **_rope(config),
        **_window(config),
    }


def _gpt(config: Any) -> dict[str, Any]:
    _without(config, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    activation = "activation_function" if hasattr(config, "activation_function") else "afn"
    # "gelu" of the first GPT is the approximation by tanh.
    known = _PLAIN if activation == "activation_function" else {**_PLAIN, "gelu": "gelu_tanh"}
    return {
        **_sizes(config),
        "max_seq_len": config.n_positions,
        "hidden_dim": getattr(config, "n_inner", None),
        "norm_eps": config.layer_norm_epsilon,
        "norm": "layer_norm",
        "positions": "learned",
        "activation": _activation(config, activation, known),
        "attention_bias": True,
        "mlp_bias": True,
        "embedding_dropout": config.embd_pdrop,
        "residual_dropout": config.resid_pdrop,
        "attention_dropout": config.attn_pdrop,
    }


def _bloom(config: Any) -> dict[str, Any]:
    _without(config, apply_residual_connection_post_layernorm=False)
    return {
        **_sizes(config),
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
        _without(config, parallel_attn=True)
        kv_heads = config.num_kv_heads
    else:
        kv_heads = 1 if config.multi_query else config.num_attention_heads
    if parallel:
        _without(config, hidden_dropout=0.0)  # of the sum of the branches, not of each
    else:
        _without(config, attention_dropout=config.hidden_dropout)  # which it applies to the residual
    two = not parallel or (grouped and config.num_ln_in_parallel_attn in (None, 2))
    return {
        **_sizes(config),
        "n_kv_heads": kv_heads,
        "max_seq_len": config.max_position_embeddings,
        "hidden_dim": config.ffn_hidden_size,
        "norm_eps": config.layer_norm_epsilon,
        "norm": "layer_norm",
        "activation": _activation(config, "activation", _PLAIN),
        "attention_bias": config.bias,
        "mlp_bias": config.bias,
        "parallel_residual": parallel,
        "shared_attention_norm": not two,
        "residual_dropout": config.hidden_dropout,
        **_rope(config),
    }


def _layer_norm_and_rope(config: Any, **others: Any) -> dict[str, Any]:
    return {
        **_sizes(config),
        "n_kv_heads": getattr(config, "num_key_value_heads", None),
        "max_seq_len": config.max_position_embeddings,
        "hidden_dim": config.intermediate_size,
        "norm": "layer_norm",
        "attention_dropout": config.attention_dropout,
        **_rope(config),
        **others,
    }


def _gpt_neox(config: Any) -> dict[str, Any]:
    return _layer_norm_and_rope(
        config,
        norm_eps=config.layer_norm_eps,
        activation=_activation(config, "hidden_act", _PLAIN),
        attention_bias=config.attention_bias,
        mlp_bias=True,
        parallel_residual=config.use_parallel_residual,
        embedding_dropout=config.hidden_dropout,
        residual_dropout=config.hidden_dropout,
    )


def _phi(config: Any) -> dict[str, Any]:
    _without(config, qk_layernorm=False)
    return _layer_norm_and_rope(
        config,
        norm_eps=config.layer_norm_eps,
        activation=_activation(config, "hidden_act", _PLAIN),
        attention_bias=True,
        mlp_bias=True,
        output_bias=True,
        parallel_residual=True,
        shared_attention_norm=True,
        embedding_dropout=config.embd_pdrop,
        residual_dropout=config.resid_pdrop,
    )


def _stablelm(config: Any) -> dict[str, Any]:
    _without(config, qk_layernorm=False)
    _without(config, hidden_dropout=0.0)  # of the feed-forward branch alone
    return _layer_norm_and_rope(
        config,
        norm_eps=config.layer_norm_eps,
        activation=_activation(config, "hidden_act", _GATED),
        attention_bias=config.use_qkv_bias,
        attention_out_bias=False,
        parallel_residual=config.use_parallel_residual,
        shared_attention_norm=config.use_parallel_residual,
    )


def _starcoder2(config: Any) -> dict[str, Any]:
    return _layer_norm_and_rope(
        config,
        norm_eps=config.norm_epsilon,
        activation=_activation(config, "hidden_act", _PLAIN),
        attention_bias=config.use_bias,
        mlp_bias=config.use_bias,
        embedding_dropout=config.embedding_dropout,
        residual_dropout=config.residual_dropout,
        **_window(config),
    )


def _opt(config: Any) -> dict[str, Any]:
    _without(config, word_embed_proj_dim=config.hidden_size, _remove_final_layer_norm=False, layerdrop=0.0)
    _without(config, layer_norm_elementwise_affine=True)
    return {
        **_sizes(config),
        "init_std": config.init_std,
        "max_seq_len": config.max_position_embeddings,
        "hidden_dim": config.ffn_dim,
        "norm": "layer_norm",
        "norm_placement": "pre" if config.do_layer_norm_before else "post",
        "positions": "learned",
        "activation": _activation(config, "activation_function", _PLAIN),
        "attention_bias": config.enable_bias,
        "mlp_bias": config.enable_bias,
        "embedding_dropout": config.dropout,
        "residual_dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
    }


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


def _qwen2(config: Any) -> dict[str, Any]:
    return {**_llama(config), "attention_bias": True, "attention_out_bias": False}


def _qwen3(config: Any) -> dict[str, Any]:
    return {**_llama(config), "qk_norm": True}


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
    ),
    "LlamaForCausalLM": Family(_llama, "model.layers", _LLAMA),
    "MistralForCausalLM": Family(_llama, "model.layers", _LLAMA),
    "Qwen2ForCausalLM": Family(_qwen2, "model.layers", _LLAMA),
    "Qwen3ForCausalLM": Family(
        _qwen3,
        "model.layers",
        {**_LLAMA, "attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"},
    ),
    "BloomForCausalLM": Family(
        _bloom,
        "transformer.h",
        {**_FALCON, **_NORMS, "embedding_norm": "transformer.word_embeddings_layernorm"},
        qkv="groups",
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
