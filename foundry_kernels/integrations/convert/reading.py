"""How `Transformer.from_hf` reads the configuration of a family; `hf_config_maps.py` has a `Reading` for each."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from foundry_kernels.models.fields import FULL, LINEAR, MLP, ModelFields
from foundry_kernels.ops.rope import RopeScaling

#: Activations by their names in transformers, for feed-forward blocks without and with a gate.
PLAIN = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
GATES = {
    "silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_new": "geglu_tanh", "gelu_pytorch_tanh": "geglu_tanh",
    "sigmoid": "glu", "relu": "reglu",
}  # fmt: skip


#: Options that do not affect the computation of a language model: names and numbers of tokens and labels, the results
#: of calls, and the origin of the configuration. (Whether a head is tied follows from the parameters.)
SILENT = frozenset((
    "_name_or_path", "name_or_path", "architectures", "model_type", "transformers_version", "dtype", "torch_dtype",
    "return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "use_cache", "prefix",
    "id2label", "label2id", "num_labels", "problem_type", "classifier_dropout", "task_specific_params",
    "finetuning_task", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "sep_token_id", "cls_token_id", "decoder_start_token_id", "tie_word_embeddings", "pretraining_tp",
    "chunk_size_feed_forward",
))  # fmt: skip


#: The usual option for each field of a size.
SIZES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "init_std": "initializer_range",
}
#: Options that some classes lack; the field then has its default.
OPTIONAL = frozenset((
    "initializer_range", "n_inner", "max_position_embeddings", "intermediate_size",
    "seq_length", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias",
))  # fmt: skip


@dataclass(frozen=True)
class Reading:
    """How to read the language model of a family.

    Attributes:
        options: fields and their options, besides `SIZES`.
        parts: functions that read fields in other ways.
        choices: fields with the same value in all models of the family, unless they are also read.
        needs: options that must have the value of this package's model.
        qkv: the layout of queries, keys and values in one matrix: "columns", one after the other, or "groups", for each
            key-value head its queries, the key and the value.
        transposed: matrices are ``[in, out]`` (`Conv1D`).
        skipped_positions: the number of rows before position 0 in the table of positions, or an option and a number to
            add.
        left_out: prefixes of weights that this package's model does not have, and that change no hidden state.
        of_model: a function that reads more fields from the model itself, whose code has changed between releases.
        silent: options that do not affect this class's computation, besides `SILENT`.
    """

    options: Mapping[str, str]
    parts: tuple[Callable[[Any], dict[str, Any]], ...] = ()
    choices: Mapping[str, Any] = field(default_factory=dict)
    needs: Mapping[str, Any] = field(default_factory=dict)
    qkv: str = "columns"
    transposed: bool = False
    skipped_positions: int | tuple[str, int] = 0
    left_out: tuple[str, ...] = ()
    of_model: Callable[[nn.Module], dict[str, Any]] = lambda model: {}
    silent: frozenset[str] = frozenset()

    def fields(self, config: Any) -> dict[str, Any]:
        """Returns the fields of `ModelConfig` for `config`.

        Raises:
            ValueError: an option has an unsupported value.
        """
        without(config, **self.needs)
        fields = dict(self.choices)
        for ours, theirs in {**SIZES, **self.options}.items():
            if theirs not in OPTIONAL or hasattr(config, theirs):
                fields[ours] = getattr(config, theirs)
        for part in self.parts:
            fields |= part(config)
        return fields

    def skipped(self, config: Any) -> int:
        """The number of rows before position 0 in the table of positions."""
        if isinstance(self.skipped_positions, int):
            return self.skipped_positions
        option, more = self.skipped_positions
        return int(getattr(config, option)) + more


class Asked:
    """A configuration that records the names of the options that were read."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._config, name)


def refuse_unread(config: Any, read: AbstractSet[str]) -> None:
    """Raises ValueError if an unknown option does not have the default of the configuration's class, because it may
    change the result."""
    aliases = getattr(config, "attribute_map", {})
    known = SILENT | {aliases.get(name, name) for name in read}
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # about some classes' defaults
    try:
        default = type(config)().to_dict()
    finally:
        logging.disable(before)
    for name, value in config.to_dict().items():
        if name not in known and (name in default or name == "quantization_config") and value != default.get(name):
            raise ValueError(
                f"{name} must be {default.get(name)!r}: Transformer does not know this option; got {value!r}"
            )


def without(config: Any, **values: Any) -> None:
    """Raises ValueError if an option has another value than this one."""
    for name, value in values.items():
        got = getattr(config, name, value)
        if got != value:
            raise ValueError(f"{name} must be {value!r}: Transformer does not have this option; got {got!r}")


def activation(name: str, known: Mapping[str, str]) -> Callable[[Any], dict[str, Any]]:
    """Returns a part of a `Reading`: the activation in the option `name`."""

    def part(config: Any) -> dict[str, Any]:
        got = getattr(config, name)
        if got not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}; got {got!r}")
        return {"activation": known[got]}

    return part


def rope(config: Any) -> dict[str, Any]:
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


def window(config: Any) -> dict[str, Any]:
    kinds = set(getattr(config, "layer_types", None) or ())
    width = getattr(config, "sliding_window", None)
    if len(kinds) > 1 or not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            "layer_types must be one for all layers, full_attention or sliding_attention; "
            f"got {', '.join(sorted(kinds))}"
        )
    return {"sliding_window": None if kinds == {"full_attention"} else width}


def linear_layers(config: Any) -> dict[str, Any]:
    """The kinds of layers. Without linear attention no size of it is a field."""
    names = {"mamba": LINEAR, "attention": FULL, "moe": MLP}  # of earlier releases, and of what is one kind here
    given = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    kinds = tuple(names.get(kind, kind) for kind in given or [LINEAR] * config.num_hidden_layers)
    if LINEAR in kinds:
        return {"layer_types": kinds}
    unused = {f.name: f.default for f in dataclasses.fields(ModelFields) if f.name.startswith("linear_")}
    return {**unused, "layer_types": kinds}


def granite(config: Any) -> dict[str, Any]:
    """The factors of Granite."""
    return {
        "embedding_scale": config.embedding_multiplier,
        "logit_scale": 1.0 / config.logits_scaling,
        "residual_scale": config.residual_multiplier,
        "attention_scale": config.attention_multiplier,
    }


def experts(count: str) -> Callable[[Any], dict[str, Any]]:
    """Returns a part of a `Reading`: a mixture of experts; the option `count` is their number."""

    def part(config: Any) -> dict[str, Any]:
        coef = config.router_aux_loss_coef  # their loss includes the routers' loss if router logits are requested
        return {
            "n_experts": getattr(config, count),
            "top_k": config.num_experts_per_tok,
            "load_balancing_coef": coef if config.output_router_logits else 0.0,
        }

    return part


def roberta(config: Any) -> dict[str, Any]:
    """Positions begin after the padding token's number, and the table also has rows for the earlier ones."""
    return {"max_seq_len": config.max_position_embeddings - config.pad_token_id - 1}


def opt(config: Any) -> dict[str, Any]:
    without(config, word_embed_proj_dim=config.hidden_size)
    return {"norm_placement": "pre" if config.do_layer_norm_before else "post"}


def gemma(config: Any) -> dict[str, Any]:
    return {"embedding_scale": config.hidden_size**0.5}


def mixed_layers(config: Any) -> dict[str, Any]:
    """Layers without experts: listed ones, or all except every n-th."""
    layers, step = range(config.num_hidden_layers), config.decoder_sparse_step
    dense = tuple(layer for layer in layers if layer in config.mlp_only_layers or (layer + 1) % step)
    return {"dense_layers": dense, "dense_hidden_dim": config.intermediate_size} if dense else {}


def latent(config: Any) -> dict[str, Any]:
    """DeepSeek's latent attention. Its option `head_dim` is the rotated part alone."""
    without(config, num_key_value_heads=config.num_attention_heads)
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    fields = {"head_dim": width, "rope_dim": config.qk_rope_head_dim, "v_head_dim": config.v_head_dim}
    scaling = getattr(config, "rope_parameters", None) or {}
    if scaling.get("rope_type", "default") != "default" and (factor := scaling.get("mscale_all_dim")):
        # As yarn's: the scores are larger too, by the square of what multiplies cos and sin without it.
        grown = max(0.1 * factor * math.log(scaling["factor"]) + 1.0, 1.0)
        fields["attention_scale"] = width**-0.5 * grown * grown
    return fields


def latent_rope(config: Any) -> dict[str, Any]:
    return {**rope(config), **latent(config), "rope_interleaved": config.rope_interleave}


def kimi_layers(config: Any) -> dict[str, Any]:
    """The kinds of layers, and the heads of linear attention, which are equal."""
    heads, width, kinds = config.linear_num_heads, config.linear_head_dim, tuple(config.layer_types)
    fields = {"linear_v_heads": heads, "linear_k_heads": heads, "linear_k_dim": width, "linear_v_dim": width}
    fields |= {"linear_conv_size": config.linear_conv_kernel_dim, "linear_kind": "kimi_delta"}
    return {"layer_types": kinds, **(fields if "linear_attention" in kinds else {})}


def deepseek_experts(config: Any) -> dict[str, Any]:
    """The mixture of DeepSeek-V3: sigmoids with a bias for the choice, groups of experts, and first layers without
    experts, or listed ones."""
    if (kinds := getattr(config, "mlp_layer_types", None)) is not None:
        dense = tuple(layer for layer, kind in enumerate(kinds) if kind == "dense")
    else:
        dense = tuple(range(min(config.first_k_dense_replace, config.num_hidden_layers)))
    return {
        **routed_by_sigmoids(config),
        "shared_expert_dim": (config.n_shared_experts or 0) * config.moe_intermediate_size or None,
        "dense_layers": dense,
        "dense_hidden_dim": config.intermediate_size if dense else None,
    }


def routed_by_sigmoids(config: Any) -> dict[str, Any]:
    """Sigmoids with a bias for the choice, and groups of experts."""
    groups, best = config.n_group, config.topk_group
    grouped = groups is not None and groups > 1  # one group means no groups
    return {
        "n_experts": config.num_local_experts,
        "top_k": config.num_experts_per_tok,
        "hidden_dim": config.moe_intermediate_size,
        "router_scoring": "sigmoid",
        "router_scale": config.routed_scaling_factor,
        "router_renormalize": config.norm_topk_prob,
        "router_groups": groups if grouped else None,
        "router_top_groups": best if grouped else None,
        "selection_bias": True,
    }


def glm4_moe(config: Any) -> dict[str, Any]:
    return {"qk_norm": config.use_qk_norm}


def falcon(config: Any) -> dict[str, Any]:
    grouped, parallel = config.new_decoder_architecture, config.parallel_attn
    if grouped:
        without(config, parallel_attn=True)
        kv_heads = config.num_kv_heads
    else:
        kv_heads = 1 if config.multi_query else config.num_attention_heads
    if parallel:
        without(config, hidden_dropout=0.0)  # it applies to the sum of the branches, not to each
    else:
        without(config, attention_dropout=config.hidden_dropout)  # it applies this one to the residual
    two_norms = not parallel or (grouped and config.num_ln_in_parallel_attn in (None, 2))
    fields = {"n_kv_heads": kv_heads, "parallel_residual": parallel, "shared_attention_norm": not two_norms}
    if not config.alibi:
        return fields | rope(config)
    # Its attention only has dropout with ALiBi.
    alibi = {"positions": "alibi", "alibi_scaled": True}
    return fields | alibi | {"attention_dropout": config.attention_dropout}
