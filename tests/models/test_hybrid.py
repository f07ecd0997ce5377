"""Models with linear attention in some layers: packed sequences, padding, the cache, what they cost and refuse."""

from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from tiny_model import HYBRID, HYBRIDS, TINY, draw, make

from foundry_kernels.models import Generator, KVCache, PagedKVCache, Transformer
from foundry_kernels.models.count import flops_by_part
from foundry_kernels.models.mixers import MIXERS
from foundry_kernels.nn import Attention, LatentAttention

every = pytest.mark.parametrize("name", HYBRIDS)


@every
def test_layers_and_costs(name: str) -> None:
    of = HYBRIDS[name]
    model = make(of)
    kinds = of.layer_types or ("full_attention",) * of.n_layers
    classes = {
        "linear_attention": MIXERS[of.linear_kind],
        "full_attention": Attention if of.kv_lora_rank is None else LatentAttention,
        "mlp": type(None),
        "hybrid": Attention,
    }
    assert [type(block.attention) for block in model.layers] == [classes[kind] for kind in kinds]
    parts = of.parameters_by_part()
    norms = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    attention = sum(
        p.numel() for n, p in model.named_parameters() if (".attention." in n or ".mixer." in n) and "norm" not in n
    )
    assert (parts["attention"], parts["norms"]) == (attention, norms)
    assert of.n_parameters == sum(p.numel() for p in model.parameters())
    matrices = [
        m.weight.numel()
        for n, m in model.named_modules()
        if (".attention." in n or ".mixer." in n) and isinstance(m, torch.nn.Linear)
    ]
    assert flops_by_part(of, 24)["attention"] == 2.0 * sum(matrices)
    cache = model.make_cache(3, 17)
    held = [*cache.k, *cache.v, *(x for state in getattr(cache, "states", ()) for x in state or ())]
    assert of.cache_bytes(3, 17, torch.float32) == sum(x.untyped_storage().nbytes() for x in held)


def test_work_of_linear_attention_does_not_grow_with_the_length() -> None:
    of = HYBRIDS["only linear"]
    assert of.flops_per_token(10) == of.flops_per_token(1000)
    assert flops_by_part(of, 10)["attention_scores"] == of.n_layers * 6 * of.n_heads * of.head_width**2
    of = dataclasses.replace(of, dim=64, head_dim=16)
    assert of.training_bytes(1, 8).activations["attention"] > 0


@pytest.mark.parametrize("backend", ["auto", "native"])
@pytest.mark.filterwarnings("ignore:backend 'native' has no kernel")
def test_backends_agree(backend: str) -> None:
    reference = make(HYBRIDS["qwen"])
    model = Transformer(HYBRIDS["qwen"], backend)
    model.load_state_dict(reference.state_dict())
    tokens, losses = draw(), []
    for one in (reference, model):
        _, loss = one(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 1e-4 * theirs.grad.norm()
    prompt = [draw(1, 5)[0]]
    assert torch.equal(model.generate(prompt, 6)[0], reference.generate(prompt, 6)[0])


@pytest.mark.slow
def test_steps_that_are_compiled() -> None:
    torch.compiler.reset()
    model, prompts = make(HYBRIDS["qwen"]), [draw(1, 5)[0], draw(1, 3)[0]]
    expected = model.generate(prompts, 4)
    for found, row in zip(model.generate(prompts, 4, compile={"backend": "aot_eager"}), expected, strict=True):
        assert torch.equal(found, row)


def test_copies_and_state_dicts() -> None:
    model = make(HYBRIDS["qwen"])
    expected = model(draw())
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(draw()), expected)
    fresh = Transformer(HYBRIDS["qwen"], "reference")
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(draw()), expected)
    assert pickle.loads(pickle.dumps(model.config)) == model.config
    torch.testing.assert_close(model.extended(48)(draw()), expected)


def test_gradients_through_a_cache_are_refused() -> None:
    model = make(HYBRID)
    with pytest.raises(RuntimeError, match="cache is for inference"):
        model(draw(), cache=model.make_cache(3)).sum().backward()


@torch.no_grad()
def test_a_cache_does_not_go_back_and_knows_a_pass_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(HYBRID).eval()
    cache = model.make_cache(3)
    model(draw(), cache=cache)
    assert cache.length == 7
    with pytest.raises(ValueError, match="length must be set to 0 or stay 7"):
        cache.length = 3
    assert "HybridCache(layers=3, of linear attention=2, batch_size=3, n_kv_heads=2" in repr(cache)
    last = model.layers[2].feed_forward
    monkeypatch.setattr(last, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(draw(3, 1), cache=cache)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="cache holds states of a forward pass that failed"):
        model(draw(3, 1), cache=cache)
    cache.length = 0
    torch.testing.assert_close(model(draw(), cache=cache), model(draw()), rtol=1e-4, atol=1e-4)


def test_what_a_hybrid_refuses() -> None:
    model, dense = make(HYBRID), make(dataclasses.replace(TINY, n_layers=3))
    with pytest.raises(ValueError, match="attn_mask must be None: linear attention"):
        model(draw(), attn_mask=torch.ones(7, 7, dtype=torch.bool))
    with pytest.raises(ValueError, match="lengths and cache exclude each other with linear attention"):
        model(draw(), lengths=torch.tensor([7, 3, 2]), cache=model.make_cache(3))
    with pytest.raises(ValueError, match=r"KVCache .* does not support linear attention"):
        KVCache(HYBRID, 3)
    pages, of_dense = PagedKVCache(HYBRID, 9, n_sequences=1), PagedKVCache(dense.config, 9)
    for one, cache in ((model, dense.make_cache(3)), (dense, model.make_cache(3)), (model, of_dense), (dense, pages)):
        with pytest.raises(ValueError, match="cache must be made for the model, whose linear attention is in"):
            one(draw(), cache=cache)
        if isinstance(cache, PagedKVCache):
            with pytest.raises(ValueError, match="cache must be made for the model, whose linear attention is in"):
                Generator(one, cache=cache)


def test_all_full_attention_is_no_pattern() -> None:
    assert dataclasses.replace(TINY, layer_types=("full_attention",) * 2) == TINY
