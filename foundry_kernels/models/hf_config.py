"""How options of transformers' configurations are read, whichever the family: see `hf_families.py`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from foundry_kernels.ops.rope import RopeScaling

PLAIN = {
    "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu_fast": "gelu_tanh", "relu": "relu"
}  # fmt: skip
GATED = {
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
        silent: options that say nothing of what this class computes, besides `SILENT`.
    """

    fields: Callable[[Any], dict[str, Any]]
    layers: str
    names: Mapping[str, str | tuple[str, ...]]
    qkv: str = "columns"
    transposed: bool = False
    skipped_positions: int = 0
    silent: frozenset[str] = frozenset()


#: Options of every configuration that say nothing of what a language model computes: names and numbers of tokens and
#: labels, what a call returns and keeps, and where the configuration comes from. That a head is tied is seen by the
#: parameters.
SILENT = frozenset((
    "_name_or_path", "name_or_path", "architectures", "model_type", "transformers_version", "dtype", "torch_dtype",
    "return_dict", "output_hidden_states", "output_attentions", "output_router_logits", "use_cache", "prefix",
    "id2label", "label2id", "num_labels", "problem_type", "classifier_dropout", "task_specific_params",
    "finetuning_task", "tokenizer_class", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id",
    "sep_token_id", "cls_token_id", "decoder_start_token_id", "tie_word_embeddings", "pretraining_tp",
    "chunk_size_feed_forward",
))  # fmt: skip


class Asked:
    """A configuration that keeps the names of the options which were read of it."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._config, name)


def refuse_unread(config: Any, read: AbstractSet[str]) -> None:
    """Raise ValueError where an option that nobody has read is not as the class of the configuration has it by default:
    it is not known here, and may change what is computed."""
    aliases = getattr(config, "attribute_map", {})
    known = SILENT | {aliases.get(name, name) for name in read}
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of what some classes have by default
    try:
        usual = type(config)().to_dict()
    finally:
        logging.disable(before)
    for name, value in config.to_dict().items():
        if name not in known and (name in usual or name == "quantization_config") and value != usual.get(name):
            raise ValueError(
                f"{name} must be {usual.get(name)!r}: Transformer does not know this option; got {value!r}"
            )


def without(config: Any, **values: Any) -> None:
    """Raise ValueError where an option has another value than the one that this model has."""
    for name, value in values.items():
        got = getattr(config, name, value)
        if got != value:
            raise ValueError(f"{name} must be {value!r}: Transformer does not have this option; got {got!r}")


def activation_of(config: Any, name: str, known: dict[str, str]) -> str:
    got = getattr(config, name)
    if got not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}; got {got!r}")
    return known[got]


def rope_fields(config: Any) -> dict[str, Any]:
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


def window_fields(config: Any) -> dict[str, Any]:
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    if len(kinds) > 1 or not kinds <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            "layer_types must be one for all layers, full_attention or sliding_attention; "
            f"got {', '.join(sorted(kinds))}"
        )
    return {"sliding_window": None if kinds == {"full_attention"} else window}


def sizes(config: Any) -> dict[str, Any]:
    return {
        "dim": config.hidden_size,
        "n_layers": config.num_hidden_layers,
        "n_heads": config.num_attention_heads,
        "vocab_size": config.vocab_size,
        "init_std": getattr(config, "initializer_range", 0.02),
    }


def llama(config: Any) -> dict[str, Any]:
    bias = bool(getattr(config, "attention_bias", False))
    return {
        **sizes(config),
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None),
        "max_seq_len": config.max_position_embeddings,
        "hidden_dim": config.intermediate_size,
        "norm_eps": config.rms_norm_eps,
        "norm_round_before_weight": True,
        "activation": activation_of(config, "hidden_act", GATED),
        "attention_bias": bias,
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "attention_dropout": config.attention_dropout,
        **rope_fields(config),
        **window_fields(config),
    }
