"""Dropout in a model: of embeddings, of branches, of attention's weights and inside the feed-forward part."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import pytest
import torch
from tiny_model import config, draw, make
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import foundry_kernels as fk
from foundry_kernels.models import ModelConfig
from foundry_kernels.nn import self_attention
from foundry_kernels.nn.mlp import ACTIVATIONS, GATES

BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["flash_attention"].backends("cpu") else ()))
KINDS = ("embedding_dropout", "residual_dropout", "attention_dropout", "activation_dropout")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["gpt2", "falcon", "vaswani"])
def test_dropout_is_of_training_alone_and_repeats_with_its_seed(name, kind):
    model = make(config(name, **{kind: 0.5}))
    plain = make(config(name))(draw())

    def drawn(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(draw())

    assert torch.equal(model.eval()(draw()), plain)
    model.train()
    assert torch.equal(drawn(0), drawn(0))
    assert not torch.allclose(drawn(0), drawn(1))
    drawn(0).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_residual_dropout_drops_whole_elements_of_both_branches():
    """The stream with all but a part dropped is the embedding plus twice some elements of the branches."""
    block, following = make(config("no-bias", residual_dropout=0.5)).layers[:2].train()
    seen: list[Tensor] = []
    for part in (block.attention, block.feed_forward):
        part.register_forward_hook(lambda module, inputs, output: seen.append(output))
    stream = torch.randn(2, 5, 16)
    branch, after = block(None, stream)
    sums: list[Tensor] = []  # the second branch is dropped out where it is added: in the pass of the next norm
    following.attention_norm.register_forward_hook(lambda module, inputs, output: sums.append(output[1]))
    following(branch, after)
    for before, dropped in zip(seen, (after - stream, sums[0] - after), strict=True):
        kept = dropped.abs() > 1e-6
        assert 0.2 < kept.float().mean() < 0.8
        torch.testing.assert_close(dropped, 2.0 * before * kept, rtol=1e-4, atol=1e-5)


def test_each_block_drops_a_branch_once():
    """Nearly all is dropped, so the stream that reaches the last norm is nearly the embedding: a branch that was
    forgotten, the last one too, would be there whole."""
    torch.manual_seed(0)
    for name in ("no-bias", "gpt2", "falcon"):
        model = make(config(name, residual_dropout=1.0 - 2.0**-30)).train()
        streams: list[Tensor] = []
        model.norm.register_forward_hook(lambda module, inputs, output, seen=streams: seen.append(output[1]))
        model.tok_embeddings.register_forward_hook(lambda module, inputs, output, seen=streams: seen.append(output))
        model.layers[0].register_forward_pre_hook(lambda module, inputs, seen=streams: seen.append(inputs[1]))
        model(draw())
        _, first, last = streams
        assert torch.equal(first, last), name
        assert not torch.equal(model.eval()(draw()), model.train()(draw()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_attention_dropout_runs_on_the_kernel_that_is_named(backend, monkeypatch):
    """And not on one in its place: each layer calls attention with a seed of its own."""
    seen = []
    call = self_attention.flash_attention

    def spy(*args, **options):
        seen.append((options["dropout_p"], options["backend"], torch.get_rng_state()))
        return call(*args, **options)

    monkeypatch.setattr(self_attention, "flash_attention", spy)
    model = make(config("gpt2", attention_dropout=0.1), {"flash_attention": backend})
    assert model.serving()["flash_attention"] == backend
    model.train()(draw())
    assert [each[:2] for each in seen] == [(0.1, backend)] * 2
    assert not torch.equal(seen[0][2], seen[1][2])
    before = torch.get_rng_state()
    model.eval()(draw())
    assert [each[:2] for each in seen[2:]] == [(0.0, backend)] * 2
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn in evaluation"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_checkpointed_blocks_drop_the_same_again(reentrant, backend):
    kinds = dict.fromkeys(KINDS, 0.3)
    found = []
    for checkpointed in (False, True):
        model = make(config("gpt2", **kinds), {"flash_attention": backend}).train()
        if checkpointed:
            for block in model.layers:
                block.forward = partial(checkpoint, block.forward, use_reentrant=reentrant)
        torch.manual_seed(3)
        _, loss = model(draw(), draw(seed=1), lengths=torch.tensor([7, 3, 5]))
        loss.backward()
        found.append((loss, *(p.grad for p in model.parameters())))
    assert all(map(torch.equal, *found))


@pytest.mark.slow
def test_attention_dropout_compiles_whole_and_draws_at_each_call():
    model = make(config("gpt2", attention_dropout=0.3)).train()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    first = compiled(draw())
    assert not torch.allclose(first, compiled(draw()))
    found = []
    for call in (model, compiled):
        torch.manual_seed(4)
        found.append(call(draw()))
    torch.testing.assert_close(*found)


def _step(config: ModelConfig, backend: object) -> list[Tensor]:
    """Logits, loss and gradients of a step of training."""
    model = make(config, backend).train()
    torch.manual_seed(5)
    logits, loss = model(draw(), draw(seed=1), return_logits=True)
    loss.backward()
    return [logits, loss, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("activation", [*GATES, *ACTIVATIONS])
def test_a_training_step_is_the_same_on_every_backend(activation):
    """With dropout of what is activated, whose mask the seed decides; of a configuration that was saved."""
    op = (GATES if activation in GATES else ACTIVATIONS)[activation][0]
    saved = json.dumps(
        dataclasses.asdict(config("qkv-bias", activation=activation, activation_dropout=0.3)), allow_nan=False
    )
    chosen = ModelConfig(**json.loads(saved))
    assert chosen == dataclasses.replace(config("qkv-bias"), activation=activation, activation_dropout=0.3)
    expected, plain = (
        _step(chosen, "reference"),
        _step(dataclasses.replace(chosen, activation_dropout=0.0), "reference"),
    )
    assert not torch.allclose(expected[0], plain[0])
    for backend in fk.OPS[op].backends("cpu"):
        for found, other in zip(_step(chosen, {op: backend}), expected, strict=True):
            torch.testing.assert_close(found, other, rtol=1e-4, atol=1e-5 * max(1.0, float(other.detach().abs().max())))


def test_the_experts_of_a_model_drop_out_in_training():
    chosen = config("groups", activation_dropout=0.3)
    first, again = (_step(chosen, "reference") for _ in range(2))
    assert all(map(torch.equal, first, again))
    assert not torch.allclose(first[0], _step(config("groups"), "reference")[0])
    torch.testing.assert_close(make(chosen).eval()(draw()), make(config("groups")).eval()(draw()))
