"""Converts encoder-decoders of transformers: `EncoderDecoder.from_hf`."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from foundry_kernels.integrations.convert.from_hf import State, known, one_kind, read_configs, refuse_unknown
from foundry_kernels.integrations.convert.hf_encoder_config_maps import SEQ2SEQ
from foundry_kernels.models.encoder_decoder import ReadModel

#: The name of a weight of one of the two parts, and of a layer in it.
PART = re.compile(r"(?:model\.)?(encoder|decoder)\.")
LAYER = re.compile(r"(?:block|layers)\.(\d+)\.")
#: The families' names of modules outside of the layers.
MODULES = {
    "embed_tokens": "tok_embeddings",
    "embed_positions": "pos_embeddings",
    "layernorm_embedding": "embedding_norm",
    "final_layer_norm": "norm",
}
_ATTENTION = {"wq": "q_proj q", "wk": "k_proj k", "wv": "v_proj v", "wo": "out_proj o"}
#: The same in a layer.
LAYER_MODULES = {
    "self_attn_layer_norm": "attention_norm",
    "encoder_attn_layer_norm": "cross_norm",
    "final_layer_norm": "ffn_norm",
    "fc1": "feed_forward.w1",
    "fc2": "feed_forward.w2",
    "layer.0.layer_norm": "attention_norm",
    "encoder layer.1.layer_norm": "ffn_norm",  # encoder layers have no cross-attention
    "decoder layer.1.layer_norm": "cross_norm",
    "layer.2.layer_norm": "ffn_norm",
}
for _theirs, _ours in {
    "self_attn": "attention",
    "encoder_attn": "cross_attention",
    "layer.0.SelfAttention": "attention",
    "layer.1.EncDecAttention": "cross_attention",
}.items():
    LAYER_MODULES |= {
        f"{_theirs}.{name}": f"{_ours}.{ours}" for ours, names in _ATTENTION.items() for name in names.split()
    }
for _theirs in ("layer.1.DenseReluDense", "layer.2.DenseReluDense"):
    LAYER_MODULES |= {
        f"{_theirs}.{name}": f"feed_forward.{ours}"
        for name, ours in {"wi": "w1", "wi_0": "w1", "wi_1": "w3", "wo": "w2"}.items()
    }


def read(model: nn.Module, changes: dict[str, Any]) -> ReadModel:
    """Returns the configurations, with `changes`, and the weights of a model of transformers; see
    `EncoderDecoder.from_hf`."""
    readings = known(model, SEQ2SEQ)
    theirs: dict[str, Any] = dict(model.named_parameters())
    configs = dict(zip(("encoder", "decoder"), read_configs(model, readings, changes), strict=True))
    one_kind(theirs)
    bias = getattr(model, "final_logits_bias", None)
    if bias is not None and bool(bias.count_nonzero()):
        raise ValueError("final_logits_bias must be 0: our output projection is tied, and has no bias")
    states: dict[str, State] = {"encoder": {}, "decoder": {}}
    unknown = []
    for name, parameter in theirs.items():
        weight = parameter.detach()
        if name.removeprefix("model.") == "shared.weight":
            for state in states.values():
                state.setdefault("tok_embeddings.weight", weight)
        elif name == "lm_head.weight":
            states["decoder"]["output.weight"] = weight
        elif (found := _ours_of(name)) is None:
            unknown.append(name)
        else:
            part, ours = found
            if ours == "pos_embeddings.weight":
                skipped = readings.encoder.skipped(model.config)
                weight = weight[skipped:][: configs[part].max_seq_len]
            states[part][ours] = weight
    refuse_unknown(unknown, type(model).__name__)
    start = getattr(model.config, "decoder_start_token_id", None)
    return ReadModel(configs["encoder"], configs["decoder"], states["encoder"], states["decoder"], start)


def _ours_of(name: str) -> tuple[str, str] | None:
    """Returns the part and this package's name of a weight, or None."""
    begin = PART.match(name)
    if begin is None:
        return None
    part, (module, _, kind) = begin[1], name[begin.end() :].rpartition(".")
    if kind not in ("weight", "bias"):
        return None
    layer = LAYER.match(module)
    if layer is None:
        ours = MODULES.get(module)
    elif module == "block.0.layer.0.SelfAttention.relative_attention_bias":
        ours = "relative_bias"
    else:
        inner = module[layer.end() :]
        ours = LAYER_MODULES.get(f"{part} {inner}", LAYER_MODULES.get(inner))
        ours = ours and f"layers.{layer[1]}.{ours}"
    return None if ours is None else (part, f"{ours}.{kind}")
