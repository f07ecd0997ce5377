"""Generation and its cache: what greedy, sampled and ragged continuations are, where they stop, what is refused."""

from __future__ import annotations

import copy
import dataclasses
import sys

import pytest
import torch
from table import Allocations
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from foundry_kernels.models import GenerationStats, KVCache, ModelConfig, Transformer, generate
from foundry_kernels.models.sampling import choose

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
CONFIG = ModelConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=13, max_seq_len=32, init_std=0.4)


@pytest.fixture(scope="module")
def model() -> Transformer:
    model = Transformer(CONFIG, "reference")
    model.init_weights(torch.Generator().manual_seed(1))
    return model


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_generates_what_the_cpu_does(model):
    prompts = [prompt(n, seed) for seed, n in enumerate((7, 1, 12))]
    there = copy.deepcopy(model).cuda().generate(prompts, 10)
    assert {row.device.type for row in there} == {"cuda"}
    assert all(torch.equal(a.cpu(), b) for a, b in zip(there, model.generate(prompts, 10), strict=True))
    generator = torch.Generator()
    with pytest.raises(ValueError, match="generator must be on the model's device"):
        copy.deepcopy(model).cuda().generate(prompts, 3, temperature=1.0, generator=generator)


def batch(size: int, length: int) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (size, length), generator=torch.Generator().manual_seed(0))


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(CONFIG.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def greedy(model: Transformer, tokens: Tensor, count: int) -> Tensor:
    """The same without a cache."""
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens[None])[0, -1:].argmax(-1)])
    return tokens


def test_ragged_prompts_continue_as_each_does_alone(model):
    prompts = [prompt(n, seed) for seed, n in enumerate((7, 1, 12, 3, 7))]
    together = generate(model, prompts, 15)
    for one, got in zip(prompts, together, strict=True):
        assert torch.equal(got, greedy(model, one, 15))
    as_lists = generate(model, [one.tolist() for one in prompts], 15)
    assert all(map(torch.equal, together, as_lists))
    as_int32 = generate(model, tuple(one.int() for one in prompts), 15)
    assert all(map(torch.equal, together, as_int32))


def test_stop_token_ends_a_row_and_is_kept(model):
    prompts = [prompt(n, seed) for seed, n in enumerate((7, 1, 12, 3))]
    whole = generate(model, prompts, 15)
    stops = {int(token) for one, row in zip(prompts, whole, strict=True) for token in row[len(one) :]}
    lengths = set()
    for stop in sorted(stops)[:4]:
        for one, row, got in zip(prompts, whole, generate(model, prompts, 15, stop_token=stop), strict=True):
            new = row[len(one) :].tolist()
            length = len(one) + (new.index(stop) + 1 if stop in new else 15)
            assert torch.equal(got, row[:length])
            lengths.add(len(got) - len(one))
    assert len(lengths) > 2  # some stopped early, and not all at once


def test_stop_token_inside_a_prompt_ends_nothing(model):
    one = torch.arange(13)
    row = greedy(model, one, 6)
    stop = min(set(range(13)) - set(row[13:].tolist()))
    assert torch.equal(model.generate([one], 6, stop_token=stop)[0], row)


def test_no_new_tokens_and_no_prompts(model):
    assert torch.equal(model.generate([[1, 2]], 0)[0], torch.tensor([1, 2]))
    assert model.generate([], 5) == []


def test_stats_of_the_two_phases(model, monkeypatch):
    """The clock moves by a second with each look: before, between and behind the phases."""
    clock = iter(range(100))
    monkeypatch.setattr(sys.modules["foundry_kernels.models.generate"], "now", lambda device: next(clock))
    prompts = [prompt(7), prompt(4), prompt(4)]
    rows, stats = model.generate(prompts, 6, return_stats=True)
    assert all(map(torch.equal, rows, model.generate(prompts, 6)))
    assert stats == GenerationStats(15, 18, prefill_tokens=12, decode_tokens=16, prefill_seconds=1, decode_seconds=1)
    assert (stats.prefill_tokens_per_second, stats.decode_tokens_per_second) == (12.0, 16.0)
    assert str(stats) == "prefill 12 tokens at 12 tokens/s, decode 16 tokens at 16 tokens/s"
    _, one = model.generate(prompts[1:], 1, return_stats=True)
    assert one == GenerationStats(8, 2, prefill_tokens=8, prefill_seconds=1)
    assert one.decode_tokens_per_second == 0.0
    stop = rows[1][6].item()  # the third new token, or an earlier one
    found, stats = model.generate(prompts[1:2], 6, stop_token=stop, return_stats=True)
    assert (stats.new_tokens, stats.decode_tokens) == (len(found[0]) - 4, len(found[0]) - 5)
    assert model.generate([], 6, return_stats=True) == ([], GenerationStats())
    with pytest.raises(TypeError, match="return_stats must be a bool; got int"):
        model.generate(prompts, 6, return_stats=1)


def test_sampling_repeats_with_its_generator(model):
    prompts = [prompt(4), prompt(6)]

    def draw(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [row.tolist() for row in model.generate(prompts, 20, temperature=1.5, generator=generator)]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "expected"),
    [
        (1.0, None, None, (0.4, 0.3, 0.2, 0.1)),
        (0.5, None, None, (16 / 30, 9 / 30, 4 / 30, 1 / 30)),
        (1.0, 2, None, (4 / 7, 3 / 7, 0, 0)),
        (1.0, 99, None, (0.4, 0.3, 0.2, 0.1)),
        (1.0, None, 0.6, (4 / 7, 3 / 7, 0, 0)),  # 0.4 is not enough, 0.7 is
        (1.0, None, 0.95, (0.4, 0.3, 0.2, 0.1)),
        (1.0, 3, 0.7, (4 / 7, 3 / 7, 0, 0)),  # 0.4/0.9 is not enough, 0.7/0.9 is
    ],
)
def test_distribution(temperature, top_k, top_p, expected):
    """Frequencies of 20000 draws lie within five standard deviations; the seed is fixed."""
    order = torch.tensor([2, 0, 3, 1])  # unsorted: where a token lies must not matter
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()[order].expand(20000, 4)
    drawn = choose(logits, temperature, top_k, top_p, torch.Generator().manual_seed(0))
    for token, rank in enumerate(order.tolist()):
        p = expected[rank]
        seen = (drawn == token).double().mean().item()
        assert abs(seen - p) <= 5 * (p * (1 - p) / 20000) ** 0.5


def test_top_k_keeps_k_of_equal_tokens():
    drawn = choose(torch.zeros(500, 9), 1.0, 3, None, torch.Generator().manual_seed(0))
    assert len(set(drawn.tolist())) == 3


@pytest.mark.parametrize("top_p", [0.3, 0.999])
def test_top_p_of_a_large_vocabulary(top_p):
    """The first tokens by likelihood are enough, or all have to be put in order."""
    logits = torch.linspace(0.0, 6.0, 1000)[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    ordered, order = logits.softmax(-1).sort(descending=True)
    count = int((ordered.cumsum(-1) - ordered < top_p).sum())
    drawn = choose(logits.expand(4000, -1), 1.0, None, top_p, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) <= set(order[:count].tolist())
    share = (drawn == order[0]).double().mean().item()
    p = (ordered[0] / ordered[:count].sum()).item()
    assert abs(share - p) <= 5 * (p * (1 - p) / 4000) ** 0.5


def test_modes_are_restored_and_nothing_needs_a_gradient(model):
    model.train()
    model.layers[0].eval()
    before = [module.training for module in model.modules()]
    seen = []
    hook = model.layers[1].register_forward_pre_hook(lambda module, _: seen.append(module.training))
    [row] = model.generate([prompt(3)], 4)
    hook.remove()
    assert seen == [False] * 4
    assert not row.requires_grad
    assert [module.training for module in model.modules()] == before

    def fail(*_):
        raise RuntimeError("half-way")

    hook = model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="half-way"):
        model.generate([prompt(3)], 4)
    hook.remove()
    assert [module.training for module in model.modules()] == before


def test_generates_under_autocast_and_in_bfloat16(model):
    with torch.autocast("cpu", torch.bfloat16):
        assert len(model.generate([prompt(3), prompt(5)], 4)[1]) == 9
    low = Transformer(CONFIG, "reference", dtype=torch.bfloat16)
    assert len(low.generate([prompt(3)], 4, temperature=1.0)[0]) == 7


@pytest.mark.parametrize(
    ("prompts", "count", "options", "error", "message"),
    [
        ([[1], []], 3, {}, ValueError, r"prompts\[1\] is empty"),
        (torch.zeros(2, 0, dtype=torch.int64), 3, {}, ValueError, r"prompts\[0\] is empty"),
        (torch.tensor([1, 2]), 3, {}, ValueError, r"prompts must be a \[B, T\] tensor"),
        ([1, 2], 3, {}, TypeError, r"prompts\[0\] must be a 1-D integer tensor"),
        ("text", 3, {}, TypeError, "prompts must be a tensor or a sequence of prompts; got str"),
        (["text"], 3, {}, TypeError, r"prompts\[0\] must be a 1-D integer tensor"),
        ([torch.zeros(2)], 3, {}, TypeError, r"prompts\[0\] must hold integers; got torch.float32"),
        ([torch.zeros(2, 2, dtype=torch.int64)], 3, {}, ValueError, r"prompts\[0\] must be 1-D"),
        ([[1], [2, 13]], 3, {}, ValueError, r"prompts\[1\] must hold tokens in 0 .. 12; got 13"),
        ([[-1]], 3, {}, ValueError, r"prompts\[0\] must hold tokens in 0 .. 12; got -1"),
        ([[1]], -1, {}, ValueError, "max_new_tokens must be at least 0; got -1"),
        ([[1]], 2.0, {}, TypeError, "max_new_tokens must be an int; got float"),
        ([[1]], 3, {"temperature": -0.1}, ValueError, "temperature must be finite and >= 0"),
        ([[1]], 3, {"temperature": float("nan")}, ValueError, "temperature must be finite and >= 0"),
        ([[1]], 3, {"top_k": 0}, ValueError, "top_k must be >= 1; got 0"),
        ([[1]], 3, {"top_p": 0.0}, ValueError, r"top_p must be None or in \(0, 1\]; got 0.0"),
        ([[1]], 3, {"top_p": 1.1}, ValueError, r"top_p must be None or in \(0, 1\]; got 1.1"),
        ([[1]], 3, {"stop_token": 13}, ValueError, r"stop_token must be None or in 0 .. 12; got 13"),
        ([[1]], 3, {"compile": "inductor"}, TypeError, "compile must be a bool or a mapping"),
    ],
)
def test_refuses(model, prompts, count, options, error, message):
    with pytest.raises(error, match=message):
        model.generate(prompts, count, **options)


# --- cache ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_step_appends_in_place_and_copies_no_cache(backend):
    """Keys and values stay where they are, and no operator of a step makes a tensor as large as one layer's."""
    config = dataclasses.replace(CONFIG, max_seq_len=512)
    long = Transformer(config, backend)
    cache = long.make_cache(2, 500)
    long(batch(2, 490), cache=cache)
    places = [x.data_ptr() for x in (*cache.k, *cache.v)]
    stored = [x[:, :, :490].clone() for x in (*cache.k, *cache.v)]
    for step in range(3):
        with Allocations() as made:
            long(batch(2, 1), cache=cache, last_only=True)
        # The reference makes the scores of one query, [2, 4, 1, S]; a layer has keys [2, 2, S, 4].
        assert 0 < made.largest < cache.k[0][:, :, : 491 + step].numel()
    assert [x.data_ptr() for x in (*cache.k, *cache.v)] == places
    assert all(torch.equal(x[:, :, :490], y) for x, y in zip((*cache.k, *cache.v), stored, strict=True))


@torch.no_grad()
def test_cache_refuses_what_does_not_fit(model):
    tokens = batch(3, 7)
    cache = model.make_cache(3, 8)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="cache is full: it holds 7 of max_len=8 positions, 7 more do not fit"):
        model(tokens, cache=cache)
    with pytest.raises(ValueError, match="cache was made for a batch of 3"):
        model(tokens[:2, :1], cache=cache)
    with pytest.raises(ValueError, match=r"of the keys, torch\.float32; got torch\.bfloat16"):
        model(tokens, cache=KVCache(CONFIG, 3, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="cache holds 1 layers; the model has 2"):
        model(tokens, cache=KVCache(dataclasses.replace(CONFIG, n_layers=1), 3))
    with pytest.raises(ValueError, match="cache must be on the tokens' device cpu; got meta"):
        model(tokens, cache=KVCache(CONFIG, 3, device="meta"))
    other = KVCache(dataclasses.replace(CONFIG, n_kv_heads=4), 3)
    with pytest.raises(ValueError, match="k must fit"):
        model(tokens, cache=other)
    assert (cache.length, other.length) == (7, 0)
    model(tokens[:, :1], cache=cache)
    assert cache.length == 8


@pytest.mark.parametrize(("size", "length"), [(0, 8), (3, 0)])
def test_cache_refuses_sizes(size, length):
    with pytest.raises(ValueError, match="batch_size" if size == 0 else "max_len"):
        KVCache(CONFIG, size, length)


@torch.no_grad()
def test_cache_under_autocast(model):
    tokens = batch(3, 7)
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.make_cache(3)
        assert cache.dtype == torch.bfloat16
        parts = [model(tokens[:, :5], cache=cache), model(tokens[:, 5:], cache=cache)]
        expected = model(tokens)
    assert (torch.cat(parts, 1) - expected).abs().max() < 0.05 * expected.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.slow), "auto"])
def test_one_compiled_step_serves_all_lengths(backend):
    """Other lengths, batches and caches compile nothing again, and the tokens are those of the model as it is."""
    model = Transformer(CONFIG, backend)
    model.init_weights(torch.Generator().manual_seed(1))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    options = {"compile": {"backend": counter}}
    expected = model.generate(batch(2, 5), 6)
    assert all(map(torch.equal, model.generate(batch(2, 5), 6, **options), expected))
    compiled = counter.frame_count
    assert compiled > 0
    prompts = [prompt(n, seed) for seed, n in enumerate((7, 12, 4))]
    expected = model.generate(prompts, 20, stop_token=3)
    assert all(map(torch.equal, model.generate(prompts, 20, stop_token=3, **options), expected))
    assert counter.frame_count == compiled
    torch._dynamo.reset()


@pytest.mark.slow
@torch.no_grad()
def test_compiles_with_a_cache():
    model = Transformer(dataclasses.replace(CONFIG, n_layers=1), "reference")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    tokens = batch(2, 9)
    cache = model.make_cache(2)
    parts = [compiled(tokens[:, :3], cache=cache)]
    parts += [compiled(tokens[:, n : n + 1], cache=cache) for n in range(3, 9)]
    assert cache.length == 9
    assert counter.frame_count <= 3
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens))
