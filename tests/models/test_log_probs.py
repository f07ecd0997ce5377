"""Log-probabilities by a model, of targets and of what `generate` and `Generator` draw; and their equality, bit by
bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Any

import pytest
import torch
from bits import same
from built import needs_native
from table import Allocations
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.models import GenerationStats, Generator, ModelConfig, PagedKVCache, Transformer

SHAPE: dict[str, Any] = {"dim": 48, "n_layers": 2, "n_heads": 4, "vocab_size": 61, "max_seq_len": 64, "init_std": 0.3}
CONFIGS: dict[str, ModelConfig] = {
    "llama": ModelConfig(**SHAPE, n_kv_heads=2),
    "tied": ModelConfig(**SHAPE, n_kv_heads=1, tie_embeddings=True, logit_scale=0.5),
    "window": ModelConfig(**SHAPE, n_kv_heads=2, sliding_window=9, qk_norm=True),
    "gpt2": ModelConfig.gpt2(**SHAPE),
    "mixtral": ModelConfig.mixtral(**SHAPE, n_kv_heads=2, n_experts=4),
}
OPTIONS = {"return_entropy": True, "return_lse": True}


def model_of(name: str = "llama", dtype: torch.dtype = torch.float32, backend: str = "auto") -> Transformer:
    model = Transformer(CONFIGS[name], backend)
    model.init_weights(torch.Generator().manual_seed(1))
    return model.to(dtype)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def near(actual: Tensor, expected: Tensor, within: float = 2e-5) -> bool:
    return actual.shape == expected.shape and bool(((actual - expected).abs() <= within * (1 + expected.abs())).all())


def plain(model: Transformer, tokens: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, ...]:
    logits = model(tokens) / temperature
    log_p = logits.log_softmax(-1)
    counts = targets != -100
    picked = log_p.gather(-1, targets.clamp_min(0).unsqueeze(-1)).squeeze(-1)
    found = picked, -(log_p.exp() * log_p).sum(-1), logits.logsumexp(-1)
    return tuple(x * counts for x in found)


# --- of targets -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_values_and_gradients_of_targets(name: str, backend: str) -> None:
    model, tokens, targets = model_of(name, backend=backend), draw(3, 11), draw(3, 11, seed=1)
    targets[0, :4] = -100
    for temperature in (1.0, 0.6):
        expected = plain(model, tokens, targets, temperature)
        found = model.log_probs(tokens, targets, temperature=temperature, **OPTIONS)
        assert len(found) == 3
        assert all(map(near, found, expected))
        parameters = [p for p in model.parameters() if p.requires_grad]
        a, e = (
            torch.cat([g.flatten() for g in torch.autograd.grad(sum((x * x).sum() for x in xs), parameters)])
            for xs in (found, expected)
        )
        assert (a - e).norm() <= 1e-5 * e.norm()
        assert torch.equal(model.log_probs(tokens, targets, temperature=temperature), found[0])


def test_other_arguments_are_those_of_the_forward_pass() -> None:
    model, tokens = model_of(), draw(1, 12)
    targets = draw(1, 12, seed=1)
    packed = model.log_probs(tokens, targets, cu_seqlens=torch.tensor([0, 5, 12], dtype=torch.int32))
    alone = [model.log_probs(tokens[:, a:b], targets[:, a:b]) for a, b in ((0, 5), (5, 12))]
    assert near(packed, torch.cat(alone, 1))
    ignored = model.log_probs(tokens, targets, ignore_index=int(targets[0, 3]))
    assert ignored[0, 3] == 0
    padded = model.log_probs(tokens, targets, lengths=torch.tensor([5]))
    assert near(padded[:, :5], alone[0])
    mixture = model_of("mixtral").train()
    log_p, stats = mixture.log_probs(tokens, targets, return_router_stats=True)
    assert torch.equal(log_p, mixture.log_probs(tokens, targets))
    assert len(stats) == 2


def test_the_hidden_states_of_the_losses() -> None:
    """`return_hidden` gives what the head gets, also behind a cache."""
    for name in ("tied", "gpt2"):
        model, tokens, targets = model_of(name), draw(2, 9), draw(2, 9, seed=1)
        hidden = model(tokens, return_hidden=True)
        weight = model.tok_embeddings.weight if model.output is None else model.output.weight
        assert near(hidden @ weight.T, model(tokens), 1e-5)
        assert torch.equal(fk.linear_log_probs(hidden, weight, targets), model.log_probs(tokens, targets))
        last = model(tokens, return_hidden=True, last_only=True)
        assert last.shape == (2, 1, 48)
        assert torch.equal(last, hidden[:, -1:])
    hidden, stats = model_of("mixtral")(tokens, return_hidden=True, return_router_stats=True)
    assert hidden.shape == (2, 9, 48)
    assert len(stats) == 2


def test_a_head_that_must_be_called() -> None:
    model, tokens, targets = model_of(), draw(2, 9), draw(2, 9, seed=1)
    expected = model.log_probs(tokens, targets, **OPTIONS)
    assert model.output is not None
    hook = model.output.register_forward_hook(lambda *_: None)
    assert all(map(near, model.log_probs(tokens, targets, **OPTIONS), expected))
    _, found = model.generate([[1, 2]], 5, return_log_probs=True)
    hook.remove()
    assert near(found[0], model.generate([[1, 2]], 5, return_log_probs=True)[1][0])


def test_no_tensor_is_as_large_as_the_logits() -> None:
    model = Transformer(dataclasses.replace(CONFIGS["llama"], vocab_size=2003))
    tokens = draw(8, 32)
    with Allocations() as made:
        model.log_probs(tokens, tokens).sum().backward()
    assert made.largest < tokens.numel() * 2003


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": 0.0}, ValueError, "temperature must be"),
        ({"return_lse": 1}, TypeError, "return_lse must be a bool"),
        ({"return_logits": True}, ValueError, "return_log_probs needs targets, and return_logits must be False"),
        ({"return_hidden": True}, ValueError, "return_hidden must be False with targets"),
        ({"targets": draw(2, 8)}, ValueError, "targets must"),
        ({"targets": draw(2, 9).float()}, TypeError, "targets must"),
        ({"targets": None}, ValueError, "return_log_probs needs targets"),
    ],
)
def test_bad_input(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        model_of().log_probs(draw(2, 9), **{"targets": draw(2, 9), **options})


# --- of a sampler -----------------------------------------------------------------------------------------------------

PROMPTS = [draw(n, seed=n) for n in (7, 1, 12, 3, 7)]
STOP = 12  # which some of the rows draw


@torch.no_grad()
def of_whole(model: Transformer, row: Tensor, begin: int, temperature: float = 1.0) -> Tensor:
    """The same from logits of the whole row."""
    logits = model(row[None])[0, begin - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, row[begin:, None])[:, 0]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.8},
        {"temperature": 1.3, "top_k": 5, "top_p": 0.8},
        {"temperature": 0.8, "log_probs_temperature": 0.8},
        {"stop_token": STOP, "temperature": 2.0},
    ],
    ids=str,
)
def test_generated_tokens(options: dict[str, Any]) -> None:
    """Tokens are what they are without the option. Log-probabilities are over the whole vocabulary, whatever
    excludes tokens."""
    model, temperature = model_of(), options.get("log_probs_temperature", 1.0)
    seeded = {"generator": torch.Generator().manual_seed(3)}
    without = model.generate(PROMPTS, 9, **{k: v for k, v in options.items() if k[0] != "l"}, **seeded)
    seeded["generator"].manual_seed(3)
    rows, found = model.generate(PROMPTS, 9, return_log_probs=True, **options, **seeded)
    assert all(map(torch.equal, rows, without))
    lengths = {len(row) - len(prompt) for row, prompt in zip(rows, PROMPTS, strict=True)}
    assert lengths == {9} if "stop_token" not in options else len(lengths) > 1
    for row, log_p, prompt in zip(rows, found, PROMPTS, strict=True):
        assert log_p.dtype == torch.float32
        assert near(log_p, of_whole(model, row, len(prompt), temperature))
    pages = PagedKVCache(model.config, 64, 4)
    seeded["generator"].manual_seed(3)
    again = model.generate(PROMPTS, 9, return_log_probs=True, cache=pages, **options, **seeded)
    for log_p, other in zip(found, again[1], strict=True):
        assert near(log_p, other)


def test_what_generate_returns() -> None:
    model = model_of()
    rows, log_probs, stats = model.generate(PROMPTS, 4, return_log_probs=True, return_stats=True)
    assert isinstance(stats, GenerationStats)
    assert stats.new_tokens == sum(map(len, log_probs)) == 20
    assert isinstance(model.generate(PROMPTS, 4), list)
    assert model.generate([], 4, return_log_probs=True) == ([], [])
    assert model.generate([], 4, return_log_probs=True, return_stats=True) == ([], [], GenerationStats())
    rows, log_probs = model.generate([[1, 2]], 0, return_log_probs=True)
    assert [x.tolist() for x in (*rows, *log_probs)] == [[1, 2], []]
    assert model_of(dtype=torch.float64).generate([[1]], 2, return_log_probs=True)[1][0].dtype == torch.float64
    training = model.train().generate([[1, 2]], 3, return_log_probs=True)[1][0]
    assert model.training
    assert not training.requires_grad
    with pytest.raises(TypeError, match="return_log_probs must be a bool"):
        model.generate([[1]], 2, return_log_probs=1)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="log_probs_temperature must be"):
        model.generate([[1]], 2, return_log_probs=True, log_probs_temperature=0.0)
    with pytest.raises(ValueError, match="return_log_probs must be left out with a draft"):
        model.generate([[1]], 2, return_log_probs=True, draft=model)


@pytest.mark.slow
def test_a_compiled_step() -> None:
    model = Transformer(dataclasses.replace(CONFIGS["llama"], n_layers=1), "reference")
    torch.compiler.reset()
    found = model.generate(PROMPTS[:2], 5, return_log_probs=True, compile={"backend": "eager"})
    expected = model.generate(PROMPTS[:2], 5, return_log_probs=True)
    assert all(map(torch.equal, found[0], expected[0]))
    assert all(map(near, found[1], expected[1]))


def test_requests_of_a_generator() -> None:
    """Some ask for them, at temperatures of their own, others do not; before and after they are done."""
    model = model_of()
    serving = Generator(model, n_pages=64, page_size=4, chunk_size=5, max_batch=4)
    asked: dict[int, Any] = {}
    for n, prompt in enumerate(PROMPTS):
        options: Any = [{}, {"return_log_probs": True}, {"return_log_probs": True, "log_probs_temperature": 0.7}][n % 3]
        drawn = {"temperature": 0.9, "generator": torch.Generator().manual_seed(n)}
        asked[serving.add(prompt, 6, **options, **drawn)] = (len(prompt), options)
    empty = serving.add([1], 0, return_log_probs=True)
    assert serving.log_probs(empty).shape == (0,)
    assert serving.log_probs(1).tolist() == []
    made: list[int] = []
    while len(made) < 2:
        made += [token for number, token, _ in serving.step() if number == 1]
    early = serving.log_probs(1)
    assert len(early) == 2
    rows = serving.run()
    assert torch.equal(serving.log_probs(1)[:2], early)
    for number in (1, 0, 3):  # fetched, and never asked for
        with pytest.raises(ValueError, match="request must be one with return_log_probs=True, not fetched yet"):
            serving.log_probs(number)
    for number in (2, 4):
        begin, options = asked[number]
        expected = of_whole(model, rows[number], begin, options.get("log_probs_temperature", 1.0))
        assert near(serving.log_probs(number), expected)
    cancelled = serving.add([1, 2], 6, return_log_probs=True)
    serving.step()
    serving.cancel(cancelled)
    with pytest.raises(ValueError, match="not fetched yet"):
        serving.log_probs(cancelled)
    with pytest.raises(TypeError, match="return_log_probs must be a bool"):
        serving.add([1], 1, return_log_probs=1)  # type: ignore[arg-type]


# --- the sampler and the trainer agree --------------------------------------------------------------------------------


def trained(model: Transformer, rows: Sequence[Tensor], temperature: float) -> list[list[Tensor]]:
    """The log-probabilities of each row's tokens as training computes them, with gradients, in several batches: padded,
    in micro-batches of two, packed; by the model's method and by the operation on its hidden states."""
    model.train()
    head = model.tok_embeddings.weight if model.output is None else model.output.weight
    options: Any = {"logit_scale": 1.0 / temperature, "ignore_index": -1}

    def padded(some: Sequence[Tensor]) -> list[Tensor]:
        batch = torch.nn.utils.rnn.pad_sequence(list(some), batch_first=True)
        targets = torch.nn.functional.pad(batch[:, 1:], (0, 1), value=-1)
        found = model.log_probs(batch, targets, temperature=temperature, ignore_index=-1)
        assert found.requires_grad
        of_hidden = fk.linear_log_probs(model(batch, return_hidden=True), head, targets, **options)
        assert same(found.detach(), of_hidden.detach())  # type: ignore[union-attr]
        return [one[: len(row) - 1].detach() for one, row in zip(found, some, strict=True)]

    parts = [padded(rows[n : n + 2]) for n in range(0, len(rows), 2)]
    joined = torch.cat(list(rows))[None]
    cu_seqlens = torch.tensor([0, *accumulate(map(len, rows))], dtype=torch.int32)
    after = torch.cat([torch.nn.functional.pad(row[1:], (0, 1), value=-1) for row in rows])[None]
    packed = model.log_probs(joined, after, cu_seqlens=cu_seqlens, temperature=temperature, ignore_index=-1)
    split = [one[:-1].detach() for one in packed[0].split([len(row) for row in rows])]
    model.eval()
    return [padded(rows), [one for part in parts for one in part], split]


QUICK = (("window", torch.bfloat16), ("mixtral", torch.float32))
SAMPLED = [
    pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow)
    for each in product(CONFIGS, (torch.float32, torch.bfloat16))
]


@needs_native
@pytest.mark.parametrize(("name", "dtype"), SAMPLED)
def test_the_sampler_has_the_trainers_bits(name: str, dtype: torch.dtype) -> None:
    """Alone, in batches of any sizes with prompts of any lengths, with a plain cache and in pages, and while requests
    come and go beside it; drawn and greedy."""
    model, temperature = model_of(name, dtype).eval(), 0.8
    prompts = [draw(n, seed=n) for n in (21, 1, 9, 30, 4, 2, 3, 3, 3)]  # the last rows exceed one pass of few rows
    options: Any = {"return_log_probs": True, "log_probs_temperature": temperature}
    before = torch.get_num_threads()
    with fk.batch_invariant():
        sampled: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        for draws in ({}, {"temperature": 1.0, "top_p": 0.9, "generator": torch.Generator().manual_seed(5)}):
            for batch in (prompts[:1], prompts):
                sampled.append(model.generate(batch, 7, **options, **draws))
                pages = PagedKVCache(model.config, 200, 4, dtype=dtype)
                sampled.append(model.generate(batch, 7, cache=pages, **options, **draws))
        serving = Generator(model, n_pages=200, page_size=4, chunk_size=8, max_batch=6)
        numbers = [
            serving.add(one, 7, temperature=1.0, generator=torch.Generator().manual_seed(n), **options)
            for n, one in enumerate(prompts)
        ]
        rows = serving.run()
        sampled.append(([rows[n] for n in numbers], [serving.log_probs(n) for n in numbers]))
        torch.set_num_threads(before + 1)
        try:
            for found, log_probs in sampled:
                for batch in trained(model, found, temperature):
                    for of_row, log_p in zip(batch, log_probs, strict=True):
                        assert len(log_p) == 7
                        assert same(of_row[-7:], log_p)
        finally:
            torch.set_num_threads(before)


@needs_native
def test_the_bits_under_autocast() -> None:
    model = model_of()
    with fk.batch_invariant(), torch.autocast("cpu", torch.bfloat16):
        rows, found = model.generate(PROMPTS, 7, temperature=1.0, return_log_probs=True, log_probs_temperature=0.8)
        for batch in trained(model, rows, 0.8):
            for of_row, log_p in zip(batch, found, strict=True):
                assert same(of_row[-7:], log_p)
