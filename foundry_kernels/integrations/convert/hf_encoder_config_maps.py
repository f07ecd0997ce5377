"""How `from_hf` maps the configurations of encoders and encoder-decoders, as data: see `Reading`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from foundry_kernels.integrations.convert.reading import GATES, PLAIN, Reading, activation, roberta

_BERT_CHOICES = {
    "causal": False,
    "head": False,
    "positions": "learned",
    "norm": "layer_norm",
    "norm_placement": "post",
    "embedding_norm": True,
    "attention_bias": True,
    "mlp_bias": True,
}
BERT = Reading(
    {
        "max_seq_len": "max_position_embeddings",
        "hidden_dim": "intermediate_size",
        "norm_eps": "layer_norm_eps",
        "token_types": "type_vocab_size",
        "embedding_dropout": "hidden_dropout_prob",
        "residual_dropout": "hidden_dropout_prob",
        "attention_dropout": "attention_probs_dropout_prob",
    },
    (activation("hidden_act", PLAIN),),
    choices=_BERT_CHOICES,
    needs={"is_decoder": False, "add_cross_attention": False},
    left_out=("pooler.",),  # of the first token's state, for heads
)
ROBERTA = dataclasses.replace(BERT, parts=(*BERT.parts, roberta), skipped_positions=("pad_token_id", 1))

#: Encoders without a head, by the names of their classes.
ENCODERS = {"BertModel": BERT, "RobertaModel": ROBERTA, "XLMRobertaModel": ROBERTA}


class Seq2Seq(NamedTuple):
    """How the two parts of an encoder-decoder are read."""

    encoder: Reading
    decoder: Reading


def _t5_gate(config: Any) -> dict[str, Any]:
    known = GATES if config.is_gated_act else PLAIN
    return activation("dense_act_fn", known)(config)


def _t5_dropout(config: Any) -> dict[str, Any]:
    """One for all."""
    fields = ("embedding", "residual", "attention", "activation", "output")
    return {f"{field}_dropout": config.dropout_rate for field in fields}


def _t5_logits(config: Any) -> dict[str, Any]:
    return {"logit_scale": config.d_model**-0.5 if config.scale_decoder_outputs else 1.0}


def _t5(choices: dict[str, Any], n_layers: str, *parts: Callable[[Any], dict[str, Any]]) -> Reading:
    return Reading(
        {
            "n_layers": n_layers,
            "hidden_dim": "d_ff",
            "head_dim": "d_kv",
            "norm_eps": "layer_norm_epsilon",
            "relative_buckets": "relative_attention_num_buckets",
            "relative_max_distance": "relative_attention_max_distance",
        },
        (_t5_gate, _t5_dropout, *parts),
        choices={"positions": "relative", "attention_scale": 1.0, "norm_round_before_weight": True, **choices},
        needs={"is_decoder": False},
        silent=frozenset({"feed_forward_proj", "initializer_factor", "is_encoder_decoder"}),
    )


def _bart_scale(config: Any) -> dict[str, Any]:
    return {"embedding_scale": config.d_model**0.5 if config.scale_embedding else 1.0}


def _bart(part: str, choices: dict[str, Any]) -> Reading:
    return Reading(
        {
            "init_std": "init_std",
            "n_layers": f"{part}_layers",
            "n_heads": f"{part}_attention_heads",
            "hidden_dim": f"{part}_ffn_dim",
            "max_seq_len": "max_position_embeddings",
            "embedding_dropout": "dropout",
            "residual_dropout": "dropout",
            "attention_dropout": "attention_dropout",
            "activation_dropout": "activation_dropout",
        },
        (_bart_scale, activation("activation_function", PLAIN)),
        choices={**_BERT_CHOICES, "causal": True, "head": True, **choices},
        needs={f"{part}_layerdrop": 0.0, "is_decoder": False},
        skipped_positions=2,
        # What generation in transformers forces is asked of `generate` here.
        silent=frozenset({"is_encoder_decoder", "forced_eos_token_id", "forced_bos_token_id"}),
    )


_ENCODER = {"causal": False, "head": False}
#: Encoder-decoders with a language model's head, by the names of their classes.
SEQ2SEQ = {
    "T5ForConditionalGeneration": Seq2Seq(_t5(_ENCODER, "num_layers"), _t5({}, "num_decoder_layers", _t5_logits)),
    "BartForConditionalGeneration": Seq2Seq(_bart("encoder", _ENCODER), _bart("decoder", {})),
}
