"""Encoders and encoder-decoders of transformers read into ours: the same states, logits, loss, gradients and tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_hf import SIZES, draw, gradients_are_equal, near, randomise
from torch import Tensor

from foundry_kernels.integrations.convert.hf_encoder_config_maps import ENCODERS, SEQ2SEQ
from foundry_kernels.integrations.convert.reading import SILENT, Asked
from foundry_kernels.models import EncoderDecoder, Transformer

transformers = pytest.importorskip("transformers")

WIDE = {**SIZES, "intermediate_size": 48}
T5 = {"vocab_size": 61, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_heads": 4, "num_layers": 2}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 7, "decoder_start_token_id": 0}
BART = {"vocab_size": 61, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4}
BART |= {"decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": 32}

#: Model type and options of its configuration.
ENCODER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", WIDE),
    "bert tanh": ("bert", {**WIDE, "hidden_act": "gelu_new", "type_vocab_size": 3, "layer_norm_eps": 1e-3}),
    "roberta": ("roberta", {**WIDE, "max_position_embeddings": 35, "type_vocab_size": 1}),
    "xlm-roberta": ("xlm-roberta", {**WIDE, "pad_token_id": 1, "eos_token_id": 2}),
}
PAIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "t5": ("t5", {**T5, "num_decoder_layers": 3}),
    "t5 1.1": ("t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "bart": ("bart", BART),
    "bart scaled": (
        "bart",
        {**BART, "scale_embedding": True, "activation_function": "relu", "decoder_start_token_id": 5},
    ),
}


def config_of(kind: str, options: dict[str, Any], **changes: Any) -> Any:
    return transformers.CONFIG_MAPPING[kind](**{**options, **changes})


def encoder(name: str, **changes: Any) -> Any:
    config = config_of(*ENCODER_MODELS[name], **changes)
    return randomise(transformers.AutoModel.from_config(config, attn_implementation="eager"))


def pair(name: str, **changes: Any) -> Any:
    config = config_of(*PAIRS[name], **changes)
    return randomise(transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager"))


def padded(lengths: list[int], padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, lengths and transformers' mask."""
    counts = torch.tensor(lengths)
    seen = torch.arange(max(lengths)) < counts[:, None]
    return draw(len(lengths), max(lengths)).masked_fill(~seen, padding), counts, seen.long()


@pytest.mark.parametrize("name", ENCODER_MODELS)
def test_states_and_gradients_of_encoders_are_equal(name):
    theirs = encoder(name)
    ours, (tokens, lengths, seen) = Transformer.from_hf(theirs), padded([11, 6], theirs.config.pad_token_id)
    rows, pooler = len(theirs.embeddings.position_embeddings.weight), sum(p.numel() for p in theirs.pooler.parameters())
    skipped = 32 * (rows - ours.config.max_seq_len)
    assert ours.config.n_parameters == sum(p.numel() for p in theirs.parameters()) - pooler - skipped
    types = draw(2, 11, seed=2) % ours.config.token_types
    options = {} if name == "roberta" else {"token_types": types}
    theirs_options = {f"{kind[:-1]}_ids": value for kind, value in options.items()}

    expected = theirs(tokens, attention_mask=seen, **theirs_options).last_hidden_state * seen[..., None]
    states = ours(tokens, lengths=lengths, **options) * seen[..., None]
    near(states, expected)
    near(ours(tokens[:1]), theirs(tokens[:1]).last_hidden_state)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3))
    (expected * weights).sum().backward()
    (states * weights).sum().backward()
    # The row of padding in the table of positions is theirs alone.
    gradients_are_equal(ours, theirs, Transformer.from_hf)


@pytest.mark.parametrize("name", PAIRS)
def test_logits_loss_gradients_and_tokens_are_equal(name):
    theirs = pair(name)
    ours, (tokens, lengths, seen) = EncoderDecoder.from_hf(theirs), padded([11, 6], theirs.config.pad_token_id)
    skipped = 2 * 2 * 32 if name.startswith("bart") else 0  # rows before those of position 0
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters()) - skipped
    labels = draw(2, 7, seed=2)
    labels[1, 5:] = -100

    expected = theirs(input_ids=tokens, attention_mask=seen, labels=labels, use_cache=False)
    logits, loss = ours(tokens, targets=labels, source_lengths=lengths, return_logits=True)
    near(logits[0], expected.logits[0])
    near(logits[1, :6], expected.logits[1, :6])  # behind that theirs reads padding
    near(loss, expected.loss)
    expected.loss.backward()
    loss.backward()
    gradients_are_equal(ours, theirs, EncoderDecoder.from_hf)

    continued = torch.full((2, 1), theirs.config.decoder_start_token_id)
    with torch.no_grad():
        for _ in range(8):
            given = {"input_ids": tokens, "attention_mask": seen, "decoder_input_ids": continued, "use_cache": False}
            continued = torch.cat([continued, theirs(**given).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(torch.stack(ours.generate(tokens, 8, source_lengths=lengths)), continued)


def test_every_class_is_tried():
    assert {type(encoder(name)).__name__ for name in ENCODER_MODELS} == ENCODERS.keys()
    assert {type(pair(name)).__name__ for name in PAIRS} == SEQ2SEQ.keys()


def test_what_is_read():
    ours = Transformer.from_hf(encoder("roberta").train(), attention_dropout=0.0)
    assert ours.training
    assert (ours.config.max_seq_len, ours.config.token_types, ours.config.causal) == (32, 1, False)
    assert (ours.config.attention_dropout, ours.config.residual_dropout) == (0.0, 0.1)
    t5 = EncoderDecoder.from_hf(pair("t5").bfloat16(), max_seq_len=64)
    assert {p.dtype for p in t5.parameters()} == {torch.bfloat16}
    assert (t5.config.max_seq_len, t5.start_token, t5.config.activation_dropout) == (64, 0, 0.1)
    assert (t5.encoder.config.n_layers, t5.config.n_layers, t5.encoder.config.head) == (2, 3, False)
    assert t5.encoder.tok_embeddings is t5.decoder.tok_embeddings
    apart = pair("bart", tie_word_embeddings=False)
    with torch.no_grad():
        apart.lm_head.weight.mul_(2.0)
    ours = EncoderDecoder.from_hf(apart)
    tokens = draw()
    near(ours(tokens, tokens), apart(tokens, decoder_input_ids=tokens).logits)
    assert ours.decoder.output is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Transformer.from_hf(encoder("bert", hidden_act="tanh")), "hidden_act must be one of gelu, .*'tanh'"),
        (lambda: Transformer.from_hf(encoder("bert", is_decoder=True)), "is_decoder must be False: .* got True"),
        (lambda: EncoderDecoder.from_hf(pair("bart", encoder_layerdrop=0.1)), "encoder_layerdrop must be 0.0: .* 0.1"),
        (lambda: EncoderDecoder.from_hf(pair("t5 1.1", feed_forward_proj="gated-tanh")), "dense_act_fn must be one of"),
        (lambda: EncoderDecoder.from_hf(with_bias()), "final_logits_bias must be 0"),
        (lambda: EncoderDecoder.from_hf(pair("bart"), max_seq_len=33), "max_seq_len is beyond the 32 rows"),
    ],
)
def test_options_that_we_do_not_have_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def with_bias() -> Any:
    model = pair("bart")
    model.final_logits_bias.fill_(1.0)
    return model


def test_other_classes_are_refused():
    with pytest.raises(TypeError, match=r"model must be one of T5ForConditionalGeneration, .*; got BertModel of"):
        EncoderDecoder.from_hf(encoder("bert"))
    with pytest.raises(TypeError, match=r"model must be one of GPT2LMHeadModel, .*; got T5ForConditionalGeneration of"):
        Transformer.from_hf(pair("t5"))
    model = pair("t5")
    model.encoder.block[1].layer[0].SelfAttention.relative_attention_bias = torch.nn.Embedding(8, 4)
    with pytest.raises(
        ValueError, match=r"no place for here: encoder\.block\.1\.layer\.0\.SelfAttention\.relative_att"
    ):
        EncoderDecoder.from_hf(model)


@pytest.mark.parametrize("name", [*ENCODER_MODELS, *PAIRS])
def test_every_option_is_declared(name):
    """Read, or said to be silent: a new one of another version of transformers fails here."""
    config = config_of(*(ENCODER_MODELS | PAIRS)[name])
    table = (
        transformers.MODEL_MAPPING if name in ENCODER_MODELS else transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    )
    model = table[type(config)].__name__
    readings = (ENCODERS[model],) if name in ENCODER_MODELS else SEQ2SEQ[model]
    asked = Asked(config)
    for reading in readings:
        reading.fields(asked)
    read = {config.attribute_map.get(option, option) for option in asked.names}.union(*(r.silent for r in readings))
    of_others = {"is_encoder_decoder", "cross_attention_hidden_size"}
    assert not type(config)().to_dict().keys() - read - SILENT - of_others
