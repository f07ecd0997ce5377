"""Speculative decoding: greedy tokens are those without a draft, sampled ones have the model's distribution, whatever
the draft is."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from slow import rest_slow

import foundry_kernels as fk
from foundry_kernels.core.registry import OPS
from foundry_kernels.models import EncoderDecoder, GenerationStats, ModelConfig, Transformer
from foundry_kernels.models.sampling import Sampling
from foundry_kernels.models.speculative import _Reader

NATIVE = "native" in OPS["flash_attention"].backends("cpu")
BACKENDS = ("reference", *(("auto",) if NATIVE else ()))
CONFIG = ModelConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=23, max_seq_len=64, init_std=0.4)
SMALL = replace(CONFIG, dim=16, n_layers=1, n_heads=2)
HYBRID = ("linear_attention", "full_attention")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4], [6, 2]]


def model_of(config: ModelConfig, seed: int = 1, backend: str = "reference") -> Transformer:
    model = Transformer(config, backend)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def like(model: Transformer, noise: float) -> Transformer:
    """A draft that agrees with the model often, and not always."""
    draft, generator = model_of(model.config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return draft


# --- greedy -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend"),
    [("llama", BACKENDS[-1]), pytest.param("llama", "reference", marks=pytest.mark.slow)]
    + [pytest.param(n, BACKENDS[-1], marks=pytest.mark.slow) for n in ("hybrid", "alibi-window", "learned", "experts")],
)
def test_greedy_tokens_are_those_without_a_draft(name: str, backend: str) -> None:
    changes = {
        "llama": {},
        "learned": {"positions": "learned"},
        "alibi-window": {"positions": "alibi", "sliding_window": 5},
        "experts": {"n_experts": 4},
        "hybrid": {"layer_types": HYBRID},
    }
    model = model_of(replace(CONFIG, **changes[name]), backend=backend)
    rates, expected = set(), model.generate(PROMPTS, 12)
    for draft, counts in ((model, (4,)), (like(model, 0.05), (1, 4, 30)), (model_of(SMALL, 2), (4,))):
        for count in counts:
            rows, stats = model.generate(PROMPTS, 12, draft=draft, draft_tokens=count, return_stats=True)
            assert all(map(torch.equal, rows, expected))
            rates.add(stats.acceptance_rate)
    assert max(rates) == 1.0, "the model accepts all of its own"
    assert min(rates) < 0.5
    assert len(rates) > 3, "the other drafts are right at times"


@pytest.mark.parametrize("kinds", rest_slow([HYBRID, None]))
def test_the_end_of_rows(kinds: tuple[str, ...] | None) -> None:
    """Each number of new tokens, and each stop token, which rows meet at different times."""
    model = model_of(replace(CONFIG, layer_types=kinds))
    draft, whole = like(model, 0.05), model.generate(PROMPTS, 12)
    for count in (0, 1, 6):
        rows = model.generate(PROMPTS, count, draft=draft)
        assert all(torch.equal(row, long[: len(p) + count]) for row, long, p in zip(rows, whole, PROMPTS, strict=True))
    lengths = set()
    for stop in range(0, CONFIG.vocab_size, 6):
        expected = model.generate(PROMPTS, 12, stop_token=stop)
        rows = model.generate(PROMPTS, 12, stop_token=stop, draft=draft)
        assert all(map(torch.equal, rows, expected))
        lengths |= {len(row) - len(prompt) for row, prompt in zip(rows, PROMPTS, strict=True)}
    assert len(lengths) > 3
    assert model.generate([], 3, draft=draft) == []


@pytest.mark.parametrize("hybrid", ["the model", "the draft"])
def test_one_of_the_two_has_linear_attention(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states go back beside keys and values, and each position after a rejected one is read again."""
    configs = [replace(CONFIG, layer_types=HYBRID), CONFIG]
    model, draft = (model_of(one, 1) for one in (configs if hybrid == "the model" else configs[::-1]))
    readers: list[_Reader] = []
    init = _Reader.__init__
    monkeypatch.setattr(_Reader, "__init__", lambda self, *given: (readers.append(self), init(self, *given))[1])
    rows, stats = model.generate(PROMPTS, 20, draft=draft, draft_tokens=4, return_stats=True)
    assert all(map(torch.equal, rows, model.generate(PROMPTS, 20)))
    assert 0.0 < stats.acceptance_rate < 1.0
    assert len(readers) == 2
    for reader in readers:
        assert len(reader.cache.sequences) == 4, "a copy is freed"


def test_a_model_with_linear_attention_reads_few_tokens_again() -> None:
    """Those that it accepted join its next proposals, until they are more than these can be."""
    model = model_of(replace(CONFIG, layer_types=HYBRID))
    draft, sizes = like(model, 0.005), []
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(inputs[0].shape[1]))
    _, stats = model.generate(PROMPTS[:1], 40, draft=draft, draft_tokens=4, return_stats=True)
    assert 0.2 < stats.acceptance_rate < 1.0
    assert max(sizes[1:]) <= 4 + 1 + 4
    assert len(sizes) <= 24


def test_positions_that_end_with_the_last_token() -> None:
    model = model_of(replace(CONFIG, positions="learned", max_seq_len=20))
    rows = model.generate(PROMPTS, 8, draft=model, draft_tokens=5)
    assert all(map(torch.equal, rows, model.generate(PROMPTS, 8)))


@pytest.mark.skipif(not NATIVE, reason="needs the compiled extension")
def test_bfloat16_is_the_same_to_the_bit_within_batch_invariant() -> None:
    """Tokens, and the logits of passes over several tokens, from pages, beside those of a token at a time."""
    model, draft = model_of(CONFIG, backend="auto").bfloat16(), model_of(SMALL, 2, "auto").bfloat16()
    with fk.batch_invariant(), torch.no_grad():
        for one in (model, draft):
            rows = model.generate(PROMPTS, 20, draft=one, draft_tokens=3)
            expected = model.generate(PROMPTS, 20)
            assert all(map(torch.equal, rows, expected))
        tokens = torch.stack([row[-20:] for row in expected])
        cache, reader = model.make_cache(4), _Reader(model, [20] * 4)
        single = [model(tokens[:, n : n + 1], cache=cache) for n in range(20)]
        chunks = [reader.read({row: tokens[row, n : n + 5].tolist() for row in range(4)}) for n in range(0, 20, 5)]
        assert torch.equal(torch.cat([chunk.unflatten(0, (4, 5)) for chunk in chunks], 1), torch.cat(single, 1))


def test_under_autocast() -> None:
    model = model_of(CONFIG)
    with torch.autocast("cpu", torch.bfloat16):
        rows, stats = model.generate(PROMPTS, 9, draft=model, temperature=1.0, return_stats=True)
    assert [len(row) - len(prompt) for row, prompt in zip(rows, PROMPTS, strict=True)] == [9] * 4
    assert stats.acceptance_rate > 0.8


# --- sampling ---------------------------------------------------------------------------------------------------------

TINY = ModelConfig(dim=8, n_layers=1, n_heads=2, vocab_size=5, max_seq_len=16, init_std=0.8)
OPTIONS = {
    "all": {"temperature": 1.0},
    "cold": {"temperature": 0.6},
    "top_k": {"temperature": 1.3, "top_k": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "both": {"temperature": 1.0, "top_k": 4, "top_p": 0.9},
}


def exact(model: Transformer, prompt: list[int], count: int, sampling: Sampling) -> dict[tuple[int, ...], float]:
    """The probability of each continuation of `count` tokens, by the model alone, without a cache."""
    found = {(): 1.0}
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + list(tokens) for tokens in found]))[:, -1]
        rows = sampling.probabilities(logits).tolist()
        found = {
            (*tokens, token): before * p
            for (tokens, before), row in zip(found.items(), rows, strict=True)
            for token, p in enumerate(row)
        }
    return found


def chi_square(seen: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]) -> float:
    """How far frequencies are from probabilities, in standard deviations of chi-square. Rare outcomes count as one."""
    total = sum(seen.values())
    assert all(expected[tokens] > 0.0 for tokens in seen), "a token that must not be drawn"
    rare = [tokens for tokens, p in expected.items() if p * total < 8]
    bins = [(seen.get(t, 0), p * total) for t, p in expected.items() if t not in rare]
    bins.append((sum(seen.get(t, 0) for t in rare), sum(expected[t] for t in rare) * total))
    statistic = sum((observed - e) ** 2 / e for observed, e in bins if e >= 8)
    freedom = sum(e >= 8 for _, e in bins) - 1
    return (statistic - freedom) / (2 * freedom) ** 0.5


@pytest.mark.parametrize(
    ("name", "draft_tokens"),
    [
        ("both", 3),
        ("linear", 3),
        *(
            pytest.param(name, n, marks=pytest.mark.slow)
            for name, n in (("all", 1), ("all", 3), ("cold", 2), ("top_k", 2), ("top_p", 2))
        ),
    ],
)
def test_sampled_tokens_have_the_models_distribution(name: str, draft_tokens: int) -> None:
    """4000 continuations of three tokens, in one batch, of a draft that is a different model: the second and the third
    token come from what is accepted, what replaces a rejected token, and what follows the last accepted one."""
    options = OPTIONS["all" if name == "linear" else name]
    kinds = HYBRID if name == "linear" else None
    # Models that agree often enough, and differ.
    pairs = replace(TINY, rope_interleaved=True, n_layers=2 if kinds else 1, layer_types=kinds)
    model, draft = (model_of(pairs, seed, BACKENDS[-1]) for seed in (3, 4))
    sampling = Sampling(**{"top_k": None, "top_p": None, "generator": torch.Generator().manual_seed(0), **options})
    rows, stats = model.generate(
        [[1, 2]] * 4000, 3, draft=draft, draft_tokens=draft_tokens, generator=sampling.generator, return_stats=True,
        **options,
    )  # fmt: skip
    seen: dict[tuple[int, ...], int] = {}
    for row in rows:
        seen[tuple(row[2:].tolist())] = seen.get(tuple(row[2:].tolist()), 0) + 1
    expected = exact(model, [1, 2], 3, sampling)
    assert 0.2 < stats.acceptance_rate < 0.9, "both ways are taken"
    assert chi_square(seen, expected) < 4.0
    assert chi_square(seen, exact(draft, [1, 2], 3, sampling._replace(top_k=None, top_p=None))) > 20.0, "it can tell"


def test_sampling_repeats_with_its_generator() -> None:
    model, draft = model_of(CONFIG), model_of(SMALL, 2)

    def draw(seed: int) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        rows = model.generate(PROMPTS, 6, temperature=1.5, draft=draft, generator=generator)
        return [row.tolist() for row in rows]

    assert draw(0) == draw(0)
    assert draw(0) != draw(1)
    narrow = model.generate(PROMPTS, 6, temperature=0.8, top_k=1, draft=draft)
    assert all(map(torch.equal, narrow, model.generate(PROMPTS, 6)))


# --- passes, statistics, refusals -------------------------------------------------------------------------------------


def test_passes_and_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is always right makes five tokens for a pass of the model; the clock moves by a second a look."""
    clock = itertools.count()
    monkeypatch.setattr(sys.modules["foundry_kernels.models.speculative"], "now", lambda device: next(clock))
    model, draft = model_of(CONFIG), model_of(CONFIG)
    sizes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(tuple(inputs[0].shape)))
    model.train()
    draft.layers[0].eval()
    modes = [module.training for one in (model, draft) for module in one.modules()]
    rows, stats = model.generate(PROMPTS, 12, draft=draft, return_stats=True)
    assert [module.training for one in (model, draft) for module in one.modules()] == modes
    assert sizes == [(1, 22), (1, 20), (1, 20), (1, 4)], "prompts, twice five tokens of four rows, and the last ones"
    assert stats == GenerationStats(22, 48, 22, 44, 1, 1, drafted_tokens=32, accepted_tokens=32)
    assert str(stats).endswith("decode 44 tokens at 44 tokens/s, accepted 32 of 32 drafted tokens")
    assert not rows[0].requires_grad
    _, stats = model.generate(PROMPTS, 1, draft=draft, return_stats=True)
    assert stats == GenerationStats(22, 4, 22, 0, 1, 0)
    assert stats.acceptance_rate == 0.0


def test_bad_input() -> None:
    model, draft = model_of(CONFIG), model_of(SMALL)
    learned = replace(SMALL, positions="learned", max_seq_len=8)
    relative = model_of(replace(CONFIG, positions="relative"))
    pair = EncoderDecoder(CONFIG, start_token=0)
    refused = {
        r"draft must have the model's vocab_size=23; got 7": {"draft": model_of(replace(SMALL, vocab_size=7))},
        r"draft must be a model with causal=True and head=True": {"draft": model_of(replace(SMALL, head=False))},
        r"draft must be on the model's device cpu; got meta": {"draft": Transformer(SMALL, device="meta")},
        r"draft must be a decoder without a context or a bias": {"draft": relative},
        r"draft must have 9 positions.*max_seq_len is 8": {"draft": model_of(learned)},
        r"draft_tokens must be >= 1; got 0": {"draft": draft, "draft_tokens": 0},
        r"compile must be left out with a draft": {"draft": draft, "compile": True},
        r"cache must be left out with a draft": {"draft": draft, "cache": fk.models.PagedKVCache(CONFIG, 4)},
    }
    for message, options in refused.items():
        with pytest.raises(ValueError, match=message):
            model.generate([[1, 2], [3]], 7, **options)
    with pytest.raises(ValueError, match="model must be a decoder without a context or a bias of positions"):
        relative.generate([[1]], 3, draft=draft)
    with pytest.raises(ValueError, match="context must be left out with a draft"):
        pair.generate([[1, 2]], 3, draft=draft)
    with pytest.raises(TypeError, match="draft must be a Transformer; got Linear"):
        model.generate([[1]], 3, draft=torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="draft_tokens must be an int"):
        model.generate([[1]], 3, draft=draft, draft_tokens=2.0)


def test_frequencies_that_follow_the_length() -> None:
    """They are refused beyond the table, where a pass over several tokens would give all of them those of the last."""
    draft = model_of(SMALL)
    model = model_of(replace(CONFIG, max_seq_len=8, rope_scaling=fk.RopeScaling("dynamic", 2.0, 8)))
    assert torch.equal(model.generate([[1, 2]], 6, draft=draft)[0], model.generate([[1, 2]], 6)[0])
    with pytest.raises(ValueError, match=r"frequencies that follow the length.*extended\(9\) fixes them"):
        model.generate([[1, 2]], 7, draft=draft)
    fixed = model.extended(9)
    assert torch.equal(fixed.generate([[1, 2]], 7, draft=draft)[0], fixed.generate([[1, 2]], 7)[0])


def test_failure_restores_the_modes() -> None:
    model, draft = model_of(CONFIG).train(), model_of(SMALL).train()
    draft.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.generate([[1]], 3, draft=draft)
    assert model.layers[0].training
    assert draft.layers[0].training
