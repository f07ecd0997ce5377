"""Encoders, and encoders with decoders: against `torch.nn.Transformer`, generation, padding, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from tiny_model import TINY, draw, make
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.models import EncoderDecoder, ModelConfig, Transformer
from foundry_kernels.models.encoder_decoder import encoder_of

BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["flash_attention"].backends("cpu") else ()))
VASWANI = dataclasses.replace(
    TINY, n_kv_heads=None, norm="layer_norm", activation="relu", attention_bias=True, mlp_bias=True,
    positions="learned", tie_embeddings=True, embedding_scale=4.0, hidden_dim=20, final_norm=True,
)  # fmt: skip
#: Each choice that says where norms and positions are is in one of these.
CONFIGS = {
    "post": dataclasses.replace(VASWANI, norm_placement="post"),
    "pre": VASWANI,
    "sinusoidal": dataclasses.replace(VASWANI, positions="sinusoidal", norm_placement="post", final_norm=False),
    "relative": dataclasses.replace(
        TINY, positions="relative", relative_buckets=8, relative_max_distance=6, attention_scale=1.0, logit_scale=0.5
    ),
    "rope": dataclasses.replace(TINY, qk_norm=True),
    "experts": dataclasses.replace(
        TINY, positions="none", n_experts=4, hidden_dim=6, dense_layers=(0,), load_balancing_coef=0.1
    ),
}
LENGTHS = torch.tensor([9, 4, 6])


def pair(config: ModelConfig = VASWANI, backend: str = "reference", **options) -> EncoderDecoder:
    """Every parameter of it matters, as in `tiny_model`."""
    model = EncoderDecoder(config, backend=backend, start_token=1, **options)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + float(parameter.dim() == 1))
    return model


def source() -> Tensor:
    return draw(3, 9, seed=5)


# --- every choice -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_padded_sources_and_caches_give_what_each_alone_gives(name, backend):
    """Greedy tokens are the argmax of the whole model on the source alone, without a cache."""
    model = pair(CONFIGS[name], {"flash_attention": backend})
    found = model.generate(source(), 6, source_lengths=LENGTHS)
    rows = [row[:n] for row, n in zip(source(), LENGTHS.tolist(), strict=True)]
    assert all(map(torch.equal, found, model.generate(rows, 6)))
    for row, tokens in zip(rows, found, strict=True):
        expected = torch.tensor([1])
        for _ in range(6):
            expected = torch.cat([expected, model(row[None], expected[None])[0, -1:].argmax(-1)])
        assert torch.equal(tokens, expected)
    whole = model(source(), draw(), source_lengths=LENGTHS)
    read, cache = model.read(source(), source_lengths=LENGTHS), model.make_cache(3)
    parts = [model(read, part, cache=cache) for part in draw().split((4, 1, 2), 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_are_counted_and_all_get_a_gradient(name):
    """Of the embedding that both share, from both; keys of a context, from a context that was read before too."""
    model = pair(CONFIGS[name]).train()
    shared = model.decoder.tok_embeddings.weight
    assert model.encoder.tok_embeddings.weight is shared
    counted = model.config.n_parameters + model.encoder.config.n_parameters - shared.numel()
    assert counted == sum(p.numel() for p in model.parameters())
    model(source(), targets=draw(), source_lengths=LENGTHS)[1].backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    assert all(g is not None for g in gradients)
    model.zero_grad()
    read = model.read(source(), source_lengths=LENGTHS)
    model(read, F.pad(draw()[:, :-1], (1, 0), value=1), draw())[1].backward()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_a_seen_mask_of_the_source_and_of_the_target():
    model, seen = pair(CONFIGS["relative"]), torch.rand(9, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    bias = torch.zeros(9, 9).masked_fill(~seen, -torch.inf)
    options = {"attn_mask": torch.ones(7, 7, dtype=torch.bool).tril(-1) | torch.eye(7, dtype=torch.bool)}
    plain = model(source(), draw())
    first = model(source(), draw(), source_mask=seen, **options)
    assert not torch.allclose(first, plain)
    for mask in (bias, fk.AttentionMask(seen)):
        torch.testing.assert_close(model(source(), draw(), source_mask=mask, **options), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n_layers", "generates"), [(1, False), pytest.param(TINY.n_layers, True, marks=pytest.mark.slow)]
)
def test_compiles_whole_and_generates_compiled(n_layers, generates):
    model = pair(dataclasses.replace(CONFIGS["relative"], activation="gelu", n_layers=n_layers))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=True)
    for length in (5, 9):
        options = {"source_lengths": torch.tensor([length, 3, 1])}
        actual = compiled(source()[:, :length], draw(), **options)
        torch.testing.assert_close(actual, model(source()[:, :length], draw(), **options))
    if generates:
        found = model.generate(source(), 4, source_lengths=LENGTHS, compile={"backend": "eager"})
        assert all(map(torch.equal, found, model.generate(source(), 4, source_lengths=LENGTHS)))


def test_state_dict_meta_device_and_modes():
    whole = pair(CONFIGS["sinusoidal"])
    with torch.device("meta"):
        late = EncoderDecoder(CONFIGS["sinusoidal"], backend="reference")
    late.to_empty(device="cpu").load_state_dict(whole.state_dict())
    assert late.encoder.tok_embeddings.weight is late.decoder.tok_embeddings.weight
    assert torch.equal(late(source(), draw()), whole(source(), draw()))
    whole.train().encoder.eval()
    whole.generate(source(), 2)
    assert (whole.training, whole.encoder.training, whole.decoder.training) == (True, False, True)
    low = late.bfloat16()(source(), draw())
    assert low.dtype == torch.bfloat16


def test_an_encoder_of_another_shape_and_embeddings_of_its_own():
    encoder = dataclasses.replace(encoder_of(TINY), dim=24, n_heads=2, n_kv_heads=1, vocab_size=5, n_layers=1)
    model = EncoderDecoder(TINY, encoder, share_embeddings=False, start_token=0)
    assert model.decoder.layers[0].cross_attention.wk.in_features == 24
    assert model(source() % 5, draw()).shape == (3, 7, 11)
    assert model.generate([[1, 2], [3]], 3, prompts=[[4, 5], [6]])[1].shape == (4,)


def test_dropouts_are_drawn_in_training_alone():
    dropouts = dict.fromkeys(("embedding", "residual", "attention", "activation", "output"), 0.2)
    config = dataclasses.replace(VASWANI, **{f"{name}_dropout": p for name, p in dropouts.items()})
    plain, model = pair(VASWANI), pair(config)
    assert torch.equal(model.eval()(source(), draw()), plain(source(), draw()))
    for name in dropouts:
        one = pair(dataclasses.replace(VASWANI, **{f"{name}_dropout": 0.2})).train()
        torch.manual_seed(0)
        first = one(source(), draw())
        assert not torch.allclose(first, plain(source(), draw())), name
        torch.manual_seed(0)
        assert torch.equal(one(source(), draw()), first)
    gated = pair(dataclasses.replace(CONFIGS["relative"], activation_dropout=0.2)).train()
    assert not torch.equal(gated(source(), draw()), gated(source(), draw()))


# --- encoders ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_of_an_encoder_see_all_others(backend):
    config = dataclasses.replace(TINY, causal=False, token_types=2)
    model, tokens = make(config, {"flash_attention": backend}), draw()
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 11
    assert not torch.allclose(model(changed)[:, 0], model(tokens)[:, 0])
    padded, alone = model(tokens, lengths=torch.tensor([7, 4, 7])), model(tokens[1:2, :4])
    torch.testing.assert_close(padded[1:2, :4], alone, rtol=1e-4, atol=1e-4)
    packed = torch.cat([tokens[0], tokens[1, :4]])[None]
    packed = model(packed, cu_seqlens=torch.tensor([0, 7, 11]))
    torch.testing.assert_close(packed[:, 7:], alone, rtol=1e-4, atol=1e-4)
    kinds = torch.zeros_like(tokens)
    torch.testing.assert_close(model(tokens, token_types=kinds), model(tokens))
    assert not torch.allclose(model(tokens, token_types=kinds + 1), model(tokens))
    _, loss = model(tokens, tokens.masked_fill(tokens > 3, -100))  # of masked tokens
    loss.backward()
    headless = Transformer(dataclasses.replace(config, head=False))
    assert headless(tokens).shape == (3, 7, 16)
    assert headless.output is None


# --- refusals ---------------------------------------------------------------------------------------------------------

ENCODER = dataclasses.replace(TINY, causal=False, head=False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: EncoderDecoder(ENCODER), "config must have causal=True; got False"),
        (lambda: EncoderDecoder(TINY, TINY), "encoder must have causal=False; got True"),
        (lambda: EncoderDecoder(TINY, dataclasses.replace(ENCODER, dim=24)), "share_embeddings needs one dim; .* 16, "),
        (
            lambda: EncoderDecoder(dataclasses.replace(TINY, context_dim=8)),
            "context_dim=16, the encoder's width; got 8",
        ),
        (lambda: EncoderDecoder(TINY, start_token=11), "start_token must be below vocab_size=11; got 11"),
        (lambda: pair()(source()), "tokens must be given without targets"),
        (lambda: EncoderDecoder(TINY)(source(), targets=draw()), "the model has no start_token"),
        (lambda: EncoderDecoder(TINY).generate(source(), 2), "prompts must be given: the model has no start_token"),
        (lambda: pair().generate(source(), 2, prompts=[[1]]), "prompts must be one for each of 3 sources; got 1"),
        (lambda: pair().generate([[1]], 2, source_lengths=LENGTHS), r"source_lengths are for a \[B, S\] tensor"),
        (lambda: pair().generate([[1], [12]], 2), r"source\[1\] must hold tokens in 0 \.\. 10; got 12"),
        (lambda: pair()(pair().read(source()), draw(), source_lengths=LENGTHS), "source_lengths must be None"),
        (lambda: pair()(source()[:2], draw()), "context must have the tokens' batch of 3; got 2"),
        (lambda: pair()(source(), draw(), source_lengths=LENGTHS[:2]), r"lengths must have shape \(3,\)"),
        (lambda: pair().decoder(draw()), "context must be given"),
        (lambda: make()(draw(), context=torch.randn(3, 4, 16)), "context needs a model with context_dim"),
        (lambda: make()(draw(), context_lengths=LENGTHS), "context_lengths needs a model with context_dim"),
        (lambda: pair().decoder(draw(), context=torch.randn(3, 4, 8)), r"context_dim=16 last; got \(3, 4, 8\)"),
        (lambda: make(ENCODER)(draw(), draw()), "targets need a model with an output projection"),
        (lambda: make(ENCODER).generate(draw(), 2), "generate needs a model with causal=True and head=True"),
        (lambda: make(ENCODER).make_cache(2), "a cache needs causal=True"),
        (lambda: make(ENCODER)(draw(), cache=make().make_cache(3)), "cache needs causal=True"),
        (lambda: make()(draw(), token_types=draw()), "token_types need a model whose configuration has token_types"),
        (
            lambda: make(dataclasses.replace(TINY, token_types=2))(draw(), token_types=draw()),
            r"token_types must be in 0 \.\. 1; got",
        ),
        (
            lambda: make(CONFIGS["relative"])(draw(1, 7), cu_seqlens=torch.tensor([0, 7])),
            "cu_seqlens does not support relative positions",
        ),
    ],
)
def test_what_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message), torch.no_grad():
        call()


def test_kinds_of_arguments():
    with pytest.raises(TypeError, match="config must be a ModelConfig; got dict"):
        EncoderDecoder({})
    with pytest.raises(TypeError, match="encoder must be a ModelConfig; got str"):
        EncoderDecoder(TINY, "bert")
    with pytest.raises(TypeError, match=r"context must be a torch\.Tensor; got int"):
        pair().decoder(draw(), context=3)
    with pytest.raises(TypeError, match="targets must be int32 or int64"):
        pair()(source(), targets=draw().float())
