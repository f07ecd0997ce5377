"""Converts configurations and weights of transformers' models to this package's, as `hf_config_maps.py` specifies.

transformers is not imported: classes are recognised by their names, options by the configuration, and weights by the
names of parameters.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.convert.hf_config_maps import READINGS as LANGUAGE_MODELS
from foundry_kernels.integrations.convert.hf_encoder_config_maps import ENCODERS
from foundry_kernels.integrations.convert.hf_mamba_config_maps import MAMBA
from foundry_kernels.integrations.convert.reading import Asked, Reading, refuse_unread
from foundry_kernels.models.config import ModelConfig

State = dict[str, Tensor]
T = TypeVar("T")

#: The modules and parameters of linear attention, which have their names here, or are split.
DELTA_NET = (
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "conv1d", "A_log", "dt_bias",
    "norm", "out_proj", "in_proj", "D",
)  # fmt: skip

#: Language models, and encoders, by the names of their classes.
READINGS = LANGUAGE_MODELS | MAMBA | ENCODERS


def _by_their_names(ours: Mapping[str, str]) -> dict[str, str]:
    return {theirs: name for name, all_theirs in ours.items() for theirs in all_theirs.split()}


#: The families' names of this package's modules. No name is ambiguous between families.
MODULES = _by_their_names(
    {
        "tok_embeddings": (
            "model.embed_tokens model.decoder.embed_tokens transformer.wte transformer.tokens_embed "
            "transformer.word_embeddings gpt_neox.embed_in embeddings.word_embeddings model.embeddings "
            "backbone.embeddings"
        ),
        "pos_embeddings": (
            "transformer.wpe transformer.positions_embed model.decoder.embed_positions embeddings.position_embeddings"
        ),
        "type_embeddings": "embeddings.token_type_embeddings",
        "embedding_norm": "transformer.word_embeddings_layernorm embeddings.LayerNorm",
        "norm": (
            "model.norm model.final_layernorm model.decoder.final_layer_norm transformer.ln_f "
            "gpt_neox.final_layer_norm model.norm_f backbone.norm_f"
        ),
        "output": "lm_head",
    }
)
LAYER = re.compile(
    r"(?:model\.layers|backbone\.layers|model\.decoder\.layers|transformer\.h|gpt_neox\.layers|encoder\.layer)\.(\d+)\."
)
#: The same of the modules in a layer; `attention.wqkv` is split.
LAYER_MODULES = _by_their_names(
    {
        "attention_norm": "norm input_layernorm ln_1 ln_attn self_attn_layer_norm attention.output.LayerNorm",
        "attention.wqkv": "attn.c_attn attention.query_key_value self_attention.query_key_value",
        "attention.wq": "self_attn.q_proj attention.self.query mixer.q_proj",
        "attention.wk": "self_attn.k_proj attention.self.key mixer.k_proj",
        "attention.wv": "self_attn.v_proj attention.self.value mixer.v_proj",
        **{f"attention.{name}": f"linear_attn.{name} mamba.{name} mixer.{name}" for name in DELTA_NET},
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.wo": (
            "self_attn.o_proj self_attn.out_proj self_attn.dense attn.c_proj attention.dense self_attention.dense "
            "attention.output.dense mixer.o_proj"
        ),
        "ffn_norm": "post_attention_layernorm pre_ff_layernorm ln_2 ln_mlp final_layer_norm output.LayerNorm",
        "feed_forward.w1": (
            "mlp.gate_proj mlp.c_fc mlp.dense_h_to_4h mlp.fc1 fc1 intermediate.dense feed_forward.gate_proj "
            "mixer.up_proj"
        ),
        "feed_forward.w2": (
            "mlp.down_proj mlp.c_proj mlp.dense_4h_to_h mlp.fc2 fc2 output.dense feed_forward.down_proj mixer.down_proj"
        ),
        "feed_forward.w3": "mlp.up_proj feed_forward.up_proj",
        "feed_forward.router": "mlp.gate mixer.gate block_sparse_moe.router block_sparse_moe.router.layer",
        "feed_forward.router.selection_bias": "mlp.gate.e_score_correction_bias mixer.gate.e_score_correction_bias",
        "feed_forward.experts.gate_up_proj": (
            "mlp.experts.gate_up_proj block_sparse_moe.experts.gate_up_proj block_sparse_moe.input_linear"
        ),
        "feed_forward.experts.down_proj": (
            "mlp.experts.down_proj mixer.experts.down_proj block_sparse_moe.experts.down_proj "
            "block_sparse_moe.output_linear"
        ),
        "feed_forward.experts.up_proj": "mixer.experts.up_proj",
        "feed_forward.shared.w13": "shared_mlp.input_linear",
        "feed_forward.shared.w1": (
            "mlp.shared_expert.gate_proj mlp.shared_experts.gate_proj mixer.shared_experts.up_proj"
        ),
        "feed_forward.shared.w2": (
            "mlp.shared_expert.down_proj mlp.shared_experts.down_proj mixer.shared_experts.down_proj "
            "shared_mlp.output_linear"
        ),
        "feed_forward.shared.w3": "mlp.shared_expert.up_proj mlp.shared_experts.up_proj",
        "feed_forward.shared_gate": "mlp.shared_expert_gate",
    }
)


def read(model: nn.Module, changes: dict[str, Any]) -> tuple[ModelConfig, State]:
    """Returns the configuration, with `changes`, and the weights of a model of transformers; see
    `Transformer.from_hf`."""
    reading = known(model, READINGS)
    name, theirs = type(model).__name__, dict(model.named_parameters())
    (config,) = read_configs(model, (reading,), {**reading.of_model(model), **changes})
    one_kind(theirs, getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    # The bias of a router's choice is not a parameter, and stays float32.
    theirs |= {key: b for key, b in model.named_buffers() if key.endswith("e_score_correction_bias")}  # type: ignore[misc]
    skipped = reading.skipped(model.config)
    state: State = {}
    unknown = []
    for their_name, parameter in theirs.items():
        if their_name.startswith(reading.left_out):
            continue
        our_name, kind = _ours(their_name, config)
        if our_name is None:
            unknown.append(their_name)
            continue
        weight = parameter.detach()
        if reading.transposed and weight.dim() == 2 and our_name.startswith("layers."):
            weight = weight.t()
        if our_name == "pos_embeddings":
            weight = weight[skipped:][: config.max_seq_len]
        parts = split_hybrid(our_name, weight, config)
        if parts:
            state |= {part + kind: of for part, of in parts.items()}
        elif our_name.endswith("attention.wqkv"):
            state |= _split(our_name.removesuffix("qkv"), kind, weight, config, reading.qkv, their_name)
        else:
            state[our_name + kind] = weight
    refuse_unknown(unknown, name)
    return config, state


def split_hybrid(name: str, weight: Tensor, config: ModelConfig) -> State:
    """Returns the parts of a weight that Qwen3-Next, Qwen3.5 and Granite 4 keep together, by their names here; none for
    others.

    A query and the gate of its head lie together. Qwen3-Next's projections of linear attention have all parts of a head
    of keys together.
    """
    prefix, _, last = name.rpartition(".")
    if last == "w13":
        return dict(zip((f"{prefix}.w1", f"{prefix}.w3"), weight.chunk(2), strict=True))
    if last == "wq" and config.attention_gate:
        query, gate = weight.unflatten(0, (config.n_heads, 2, config.head_width)).unbind(1)
        return {f"{prefix}.wq": query.flatten(0, 1), f"{prefix}.wg": gate.flatten(0, 1)}
    if last == "A_log":
        return {name: weight.flatten()}  # Kimi Linear's has the shape of a batch
    if last not in ("in_proj_qkvz", "in_proj_ba"):
        return {}
    heads = config.linear_heads
    of_each = weight.unflatten(0, (heads.k_heads, -1))
    group = heads.v_heads // heads.k_heads
    if last == "in_proj_ba":
        b, a = (part.flatten(0, 1) for part in of_each.split((group, group), 1))
        return {f"{prefix}.in_proj_b": b, f"{prefix}.in_proj_a": a}
    sizes = heads.k_dim, heads.k_dim, group * heads.v_dim, group * heads.v_dim
    q, k, v, z = (part.flatten(0, 1) for part in of_each.split(sizes, 1))
    return {f"{prefix}.in_proj_qkv": torch.cat([q, k, v]), f"{prefix}.in_proj_z": z}


def known(model: nn.Module, table: Mapping[str, T]) -> T:
    """The entry of `table` for the class of a model of transformers."""
    name, home = type(model).__name__, type(model).__module__
    if name not in table or not hasattr(model, "config") or home.partition(".")[0] != "transformers":
        raise TypeError(f"model must be one of {', '.join(table)} of transformers; got {name} of {home}")
    return table[name]


def read_configs(model: nn.Module, readings: Sequence[Reading], changes: Mapping[str, Any]) -> list[ModelConfig]:
    """Returns the configuration that each of `readings` finds in a model's, with `changes`."""
    asked = Asked(model.config)
    found = [reading.fields(asked) for reading in readings]
    refuse_unread(model.config, asked.names.union(*(reading.silent for reading in readings)))
    tied = all(name != "lm_head.weight" for name, _ in model.named_parameters())  # a shared parameter has one name
    configs = []
    for fields in found:
        config = ModelConfig(**{**fields, "tie_embeddings": tied and fields.get("head", True)})
        rows = config.max_seq_len
        config = dataclasses.replace(config, **changes)
        if config.positions == "learned" and config.max_seq_len > rows:
            raise ValueError(
                f"max_seq_len is beyond the {rows} rows of the table of positions; got {config.max_seq_len}"
            )
        configs.append(config)
    return configs


def one_kind(theirs: Mapping[str, Tensor], wide: Collection[str] = ()) -> None:
    """Raises ValueError unless all weights have the same dtype and device. wide: parts of the names of weights that
    may be float32 in any case."""
    kinds = {
        (weight.dtype, weight.device)
        for name, weight in theirs.items()
        if weight.dtype != torch.float32 or not any(part in name for part in wide)
    }
    if len(kinds) != 1:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ValueError(f"model must have weights of one dtype on one device; got {found}")


def refuse_unknown(unknown: list[str], name: str) -> None:
    if unknown:
        raise ValueError(f"model has weights that {name} has no place for here: {_few(sorted(unknown))}")


def _ours(their_name: str, config: ModelConfig) -> tuple[str | None, str]:
    """Returns this package's name of a parameter's module, or None, and the rest of the parameter's name. The rest is
    empty if the parameter itself has an entry (those of experts)."""
    last = their_name.rpartition(".")[2]
    kind = f".{last}" if last in ("weight", "bias") else ""
    module, layer = their_name.removesuffix(kind), LAYER.match(their_name)
    if layer is None:
        return MODULES.get(module), kind
    part, _, rest = module[layer.end() :].partition(".")
    if part == "self_attn" and config.kv_lora_rank is not None:  # which has its names here too
        return f"layers.{layer[1]}.attention.{rest.rpartition('.')[2]}", kind
    ours = LAYER_MODULES.get(module[layer.end() :])
    if ours is not None and ".experts." in ours:
        kind = ""
    if ours is not None and ".mamba." in their_name and int(layer[1]) in config.full_layers:
        ours = ours.replace("attention.", "mixer.")
    if ours == "attention_norm" and config.one_branch and int(layer[1]) in config.mlp_layers:
        ours = "ffn_norm"
    if ours is not None and config.n_experts is None:  # the shared expert is all there is
        ours = ours.replace("feed_forward.shared.", "feed_forward.")
    return ours and f"layers.{layer[1]}.{ours}", kind


def check(state: State, expected: State, model: nn.Module) -> None:
    """Raises ValueError if weights are missing, unknown or have another shape."""
    name = type(model).__name__
    if missing := sorted(expected.keys() - state.keys()):
        raise ValueError(f"{name} lacks the weights of {_few(missing)}")
    if unknown := sorted(state.keys() - expected.keys()):
        raise ValueError(f"{name} has weights that its configuration does not ask for: {_few(unknown)}")
    for key, weight in state.items():
        if weight.shape != expected[key].shape:
            raise ValueError(
                f"{name}'s {key} must have shape {tuple(expected[key].shape)}, by its configuration; "
                f"got {tuple(weight.shape)}"
            )


def _split(prefix: str, kind: str, weight: Tensor, config: ModelConfig, how: str, name: str) -> State:
    """wq, wk and wv from one matrix, or from one bias."""
    queries, keys, width = config.n_heads, config.kv_heads, config.head_width
    if weight.shape[0] != (queries + 2 * keys) * width:
        raise ValueError(
            f"{name} must hold {queries} query and 2 x {keys} key and value heads of {width}, "
            f"{(queries + 2 * keys) * width} rows; got {weight.shape[0]}"
        )
    if how == "columns":
        parts = weight.split((queries * width, keys * width, keys * width))
    else:
        group = queries // keys
        heads = weight.unflatten(0, (keys, group + 2, width)).split((group, 1, 1), 1)
        parts = tuple(part.flatten(0, 2) for part in heads)
    return {f"{prefix}{part}{kind}": w for part, w in zip("qkv", parts, strict=True)}


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
