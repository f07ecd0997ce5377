"""Continuous batching: each request's tokens are those that `generate` gives it alone, whatever runs beside it."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from foundry_kernels.core.registry import OPS
from foundry_kernels.models import Generator, KVCache, ModelConfig, OutOfPages, PagedKVCache, Transformer
from foundry_kernels.models import generator as generator_module
from foundry_kernels.ops.rope import RopeScaling

NATIVE = "native" in OPS["flash_attention"].backends("cpu")
BACKENDS = ("reference", *(("native",) if NATIVE else ()))
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 23, "max_seq_len": 64, "init_std": 0.4}
HYBRID = ("linear_attention", "full_attention", "linear_attention")
CONFIGS: dict[str, ModelConfig] = {
    "llama": ModelConfig(**SHAPE),  # type: ignore[arg-type]
    "learned": ModelConfig(**SHAPE, positions="learned"),  # type: ignore[arg-type]
    "alibi-window": ModelConfig(**SHAPE, positions="alibi", sliding_window=5),  # type: ignore[arg-type]
    "experts": ModelConfig(**SHAPE, n_experts=4, top_k=2),  # type: ignore[arg-type]
    "hybrid": ModelConfig(**{**SHAPE, "n_layers": 3}, layer_types=HYBRID),  # type: ignore[arg-type]
}


def model_of(name: str = "llama", backend: str = BACKENDS[-1], dtype: torch.dtype = torch.float32) -> Transformer:
    model = Transformer(CONFIGS[name], backend)
    model.init_weights(torch.Generator().manual_seed(1))
    return model.to(dtype).eval()


def draw(count: int, seed: int = 0) -> Tensor:
    return torch.randint(23, (count,), generator=torch.Generator().manual_seed(seed))


class Requests:
    """Random requests, and what each gets alone."""

    def __init__(self, model: Transformer, count: int, seed: int) -> None:
        self.model, self.draws = model, random.Random(seed)
        self.asked = [self._one(100 * seed + n) for n in range(count)]

    def _one(self, seed: int) -> tuple[Tensor, int, dict[str, Any]]:
        options: dict[str, Any] = self.draws.choice([{}, {}, {"temperature": 0.9}, {"temperature": 1.3, "top_k": 5}])
        options = options | self.draws.choice([{}, {"stop_token": self.draws.randrange(23)}])
        if options.get("temperature"):
            options["top_p"] = self.draws.choice([None, 0.8])
        return draw(self.draws.randint(1, 40), seed), self.draws.choice([0, 1, 2, 7, 12]), options

    def add(self, generator: Generator, index: int, **more: Any) -> int:
        prompt, count, options = self.asked[index]
        return generator.add(prompt, count, generator=torch.Generator().manual_seed(index), **options, **more)

    def alone(self, index: int) -> Tensor:
        prompt, count, options = self.asked[index]
        [row] = self.model.generate([prompt], count, generator=torch.Generator().manual_seed(index), **options)
        return row


@pytest.mark.parametrize(
    ("name", "backend", "n_pages", "page_size", "max_batch", "chunk_size"),
    [
        ("llama", "reference", 100, 4, 32, 512),
        ("llama", BACKENDS[-1], 18, 3, 32, 5),  # of which the longest needs 17
        ("llama", BACKENDS[-1], 60, 4, 3, 1),
        ("learned", BACKENDS[-1], 60, 1, 8, 16),
        ("alibi-window", BACKENDS[-1], 9, 16, 5, 7),
        ("experts", "auto", 6, 16, 8, 13),
        ("hybrid", "reference", 100, 4, 32, 512),
        ("hybrid", "auto", 18, 3, 32, 5),
        ("hybrid", "auto", 60, 4, 3, 1),
    ],
)
def test_tokens_are_those_of_each_request_alone(
    name: str, backend: str, n_pages: int, page_size: int, max_batch: int, chunk_size: int
) -> None:
    """Greedy and drawn, of prompts of 1 to 40 tokens that come while others run, with and without pages for all."""
    model = model_of(name, backend)
    generator = Generator(model, n_pages=n_pages, page_size=page_size, max_batch=max_batch, chunk_size=chunk_size)
    requests = Requests(model, 14, n_pages)
    numbers: dict[int, int] = {}
    made: dict[int, list[int]] = {}
    ended: list[int] = []
    while len(numbers) < 14 or generator.running or generator.waiting:
        for _ in range(requests.draws.choice([0, 0, 1, 4])):
            if len(numbers) < 14:
                index = len(numbers)
                numbers[index] = requests.add(generator, index)
        events = generator.step()
        assert len({event.request for event in events}) == len(events)
        for number, token, last in events:
            assert number not in ended
            made.setdefault(number, []).append(token)
            ended += [number] * last
        assert len(generator.running) <= max_batch
    assert generator.cache.n_free == n_pages, "a page leaked"
    assert generator.cache.sequences == ()
    assert generator.step() == []
    for index, number in numbers.items():
        expected, found = requests.alone(index), generator.result(number)
        assert torch.equal(found, expected)
        assert found[len(requests.asked[index][0]) :].tolist() == made.get(number, [])
        assert (number in ended) == bool(requests.asked[index][1])
    with pytest.raises(ValueError, match="request must be one that is done and not fetched yet; got 0"):
        generator.result(0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["llama", "hybrid"])
def test_cuda_generates_what_the_cpu_does(name: str) -> None:
    model, lengths = model_of(name, "auto"), (7, 1, 40, 12)
    there = copy.deepcopy(model).cuda()
    generator = Generator(there, n_pages=20, page_size=4, chunk_size=9)
    numbers = [generator.add(draw(n, n), 10) for n in lengths]
    first = generator.add(draw(5), 8, temperature=1.0, generator=torch.Generator("cuda").manual_seed(3))
    found = generator.run()
    assert generator.cache.n_free == 20
    assert {row.device.type for row in found.values()} == {"cuda"}
    for number, n in zip(numbers, lengths, strict=True):
        assert torch.equal(found[number].cpu(), model.generate([draw(n, n)], 10)[0])
    alone = there.generate([draw(5)], 8, temperature=1.0, generator=torch.Generator("cuda").manual_seed(3))[0]
    assert torch.equal(found[first], alone)
    with pytest.raises(ValueError, match="generator must be on the model's device"):
        generator.add([1], 1, temperature=1.0, generator=torch.Generator())


@pytest.mark.parametrize("positions", ["rope", "sinusoidal"])
def test_requests_go_beyond_max_seq_len(positions: str) -> None:
    model = Transformer(ModelConfig(**{**SHAPE, "max_seq_len": 8}, positions=positions)).eval()  # type: ignore[arg-type]
    generator = Generator(model, n_pages=30, page_size=4, chunk_size=7)
    numbers = [generator.add(draw(n, n), 9) for n in (5, 30, 1)]
    found = generator.run()
    for number, n in zip(numbers, (5, 30, 1), strict=True):
        assert torch.equal(found[number], model.generate([draw(n, n)], 9)[0])


def test_a_step_is_one_pass_over_a_chunk_beside_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of().train()
    generator = Generator(model, n_pages=20, page_size=4, chunk_size=6)
    taken: list[list[int]] = []
    forward = model.forward

    def record(tokens: Tensor, **options: Any) -> Any:
        assert not any(module.training for module in model.modules())
        taken.append(options["cu_seqlens"].diff().tolist())
        return forward(tokens, **options)

    monkeypatch.setattr(model, "forward", record)
    model.layers[0].eval()  # stays so
    first = generator.add(draw(2), 8)
    assert [event.request for event in generator.step()] == [first]
    second, third = generator.add(draw(13), 3), generator.add(draw(4), 2)
    steps = [[event.request for event in generator.step()] for _ in range(5)]
    assert taken == [[2], [1, 6], [1, 6], [1, 1, 4], [1, 1, 1], [1, 1]]
    assert steps == [[first], [first], [first, second, third], [first, second, third], [first, second]]
    assert model.training
    assert model.layers[1].training
    assert not model.layers[0].training


def test_requests_wait_for_pages_in_their_order() -> None:
    """A request that fits now does not overtake one that waits, and one that has begun never lacks a page."""
    model = model_of()
    generator = Generator(model, n_pages=5, page_size=4)
    first, second, third = generator.add(draw(9), 4), generator.add(draw(5), 6), generator.add(draw(1), 1)
    generator.step()
    assert generator.cache.n_free == 2
    assert (generator.running, generator.waiting) == ((first,), (second, third))
    order = [event.request for event in generator if event.last]
    assert order == [first, third, second]


def test_pages_that_others_hold() -> None:
    """Sequences that the cache's owner has there stay as they are; a request that can only wait for them raises."""
    model = model_of()
    cache = PagedKVCache(model.config, 6, 4)
    own = cache.add()
    with torch.no_grad():
        model(draw(16)[None], cache=cache)
    stored = [x[list(cache.block_table(own))].clone() for x in cache.k]
    generator = Generator(model, cache=cache)
    done, large = generator.add(draw(3), 5), generator.add(draw(9), 4)
    with pytest.raises(OutOfPages, match="needs 3 pages of 4 positions more, and 2 of 6 are free"):
        generator.run()
    assert generator.waiting == (large,)
    assert torch.equal(generator.result(done), model.generate([draw(3)], 5)[0])
    assert all(torch.equal(x[list(cache.block_table(own))], y) for x, y in zip(cache.k, stored, strict=True))
    cache.free(own)
    assert torch.equal(generator.run()[large], model.generate([draw(9)], 4)[0])
    assert cache.n_free == 6


@pytest.mark.parametrize("name", ["llama", "hybrid"])
@pytest.mark.parametrize("chunk_size", [3, 64])
def test_cancelled_requests_leave_others_alone(chunk_size: int, name: str) -> None:
    model = model_of(name, "auto")
    generator = Generator(model, n_pages=16, page_size=4, chunk_size=chunk_size)
    numbers = [generator.add(draw(n, n), 6) for n in (20, 9, 12, 30)]
    generator.step()
    generator.step()
    expected = [model.generate([draw(n, n)], 6)[0] for n in (20, 9, 12, 30)]
    assert numbers[0] in generator.running
    assert numbers[3] in generator.waiting
    for number, n in ((numbers[0], 20), (numbers[3], 30)):
        found = generator.cancel(number)
        assert torch.equal(found, expected[numbers.index(number)][: len(found)])
        assert len(found) >= n
        with pytest.raises(ValueError, match="request must be one that is done"):
            generator.cancel(number)
    with pytest.raises(ValueError, match=f"request {numbers[1]} is not done"):
        generator.result(numbers[1])
    found_by_number = generator.run()
    assert list(found_by_number) == numbers[1:3]
    assert all(map(torch.equal, found_by_number.values(), expected[1:3]))
    assert generator.cache.n_free == 16
    done = generator.add(draw(3), 0)
    assert torch.equal(generator.cancel(done), draw(3))


def test_requests_that_begin_alike_share_pages() -> None:
    """A prefix is read once, over whole and partial pages; nobody writes to what others have."""
    model = model_of()
    for shared, page_size, chunk_size in ((12, 4, 64), (13, 4, 5), (10, 16, 3)):
        prefix = draw(shared, 5)
        prompts = [torch.cat([prefix, draw(n, n + 1)]) for n in (9, 0, 4, 7)]
        generator = Generator(model, n_pages=24, page_size=page_size, chunk_size=chunk_size)
        first = generator.add(prompts[0], 12)
        numbers = [first, *[generator.add(prompt, 9, prefix_of=first) for prompt in prompts[1:]]]
        for _ in range(20):  # none is done by then
            generator.step()
            if len(generator.running) == 4:
                break
        tables = [generator.cache.block_table(sequence) for sequence in generator.cache.sequences]
        whole = shared // page_size  # but at least one token of a prompt is read
        assert len({table[: (shared - 1) // page_size] for table in tables}) == 1
        assert len({table[whole] for table in tables}) == 4
        found = generator.run()
        for number, prompt in zip(numbers, prompts, strict=True):
            expected = model.generate([prompt], 12 if number == first else 9)[0]
            assert torch.equal(found[number], expected)
        assert generator.cache.n_free == 24
        late = generator.add(prompts[1], 3, prefix_of=first)  # which is done
        assert torch.equal(generator.run()[late], model.generate([prompts[1]], 3)[0])


def test_a_prefix_reaches_into_what_was_generated() -> None:
    """The newest token is not stored yet, so it is read again."""
    model = model_of()
    generator = Generator(model, n_pages=24, page_size=4)
    first = generator.add(draw(6), 14)
    so_far = [*draw(6).tolist(), *[generator.step()[0].token for _ in range(8)]]
    second = generator.add([*so_far, 3, 5], 6, prefix_of=first)
    generator.step()
    tables = [generator.cache.block_table(sequence) for sequence in generator.cache.sequences]
    assert tables[0][:3] == tables[1][:3]
    assert tables[0][3] != tables[1][3]
    found = generator.run()
    assert torch.equal(found[first], model.generate([draw(6)], 14)[0])
    assert torch.equal(found[second], model.generate([[*so_far, 3, 5]], 6)[0])


@pytest.mark.parametrize("name", ["llama", "hybrid"])
@pytest.mark.parametrize("place", ["a layer", "the draw"])
def test_after_a_step_that_fails_the_next_does_the_same(place: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(name, "auto")
    generator = Generator(model, n_pages=14, page_size=4, chunk_size=5)
    numbers = [generator.add(draw(n, n), 5) for n in (9, 1, 17)]
    steps = 0
    while generator.running or generator.waiting:
        target = (model.layers[1], "forward") if place == "a layer" else (generator_module, "_draw")
        if name == "llama" or steps in (1, 5, 13):  # a hybrid begins again
            monkeypatch.setattr(*target, lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                generator.step()
            monkeypatch.undo()
        generator.step()
        steps += 1
        assert steps < 60
    for number, n in zip(numbers, (9, 1, 17), strict=True):
        assert torch.equal(generator.result(number), model.generate([draw(n, n)], 5)[0])
    assert generator.cache.n_free == 14


@pytest.mark.parametrize("name", ["llama", "hybrid"])
@pytest.mark.parametrize("seed", range(3))
def test_random_prefixes_and_cancels_leak_nothing(seed: int, name: str) -> None:
    model, draws = model_of(name, "auto"), random.Random(seed)
    generator = Generator(model, n_pages=20, page_size=3, max_batch=5, chunk_size=6)
    prefix, asked, done = draw(15, seed), {}, {}
    for _ in range(60):
        if len(asked) < 14 and draws.random() < 0.5:
            prompt = torch.cat([prefix[: draws.randint(1, 15)], draw(draws.randint(0, 9), draws.randrange(99))])
            count = draws.choice([1, 3, 8])
            of = draws.choice(list(asked)) if asked and draws.random() < 0.8 else None
            asked[generator.add(prompt, count, prefix_of=of)] = (prompt, count)
        if draws.random() < 0.1 and generator.running:
            number = draws.choice(generator.running)
            done[number] = generator.cancel(number)
        generator.step()
        assert len(generator.cache.sequences) == len(generator.running)
    done |= generator.run()
    assert generator.cache.n_free == 20
    assert done.keys() == asked.keys()
    for number, (prompt, count) in asked.items():
        assert torch.equal(done[number], model.generate([prompt], count)[0][: len(done[number])])


@torch.no_grad()
def test_bad_input() -> None:
    model = model_of()
    cache = PagedKVCache(model.config, 8, 4)
    generator = Generator(model, cache=cache)

    def of(n_pages: int | None = None, cache: PagedKVCache | None = None, **changes: Any) -> Generator:
        return Generator(Transformer(ModelConfig(**{**SHAPE, **changes})), n_pages=n_pages, cache=cache)

    def add(prompt: Any, count: int = 1, **options: Any) -> int:
        return generator.add(prompt, count, **options)

    dynamic = RopeScaling("dynamic", 2.0, original_max_position_embeddings=64)
    refused = {
        "one of n_pages and cache must be given; got neither": lambda: Generator(model),
        "one of n_pages and cache must be given; got both": lambda: Generator(model, n_pages=3, cache=cache),
        "page_size must be None with a cache": lambda: Generator(model, page_size=3, cache=cache),
        "n_pages must be >= 1; got 0": lambda: Generator(model, n_pages=0),
        "page_size must be >= 1; got 0": lambda: Generator(model, n_pages=1, page_size=0),
        "max_batch must be >= 1; got 0": lambda: Generator(model, n_pages=1, max_batch=0),
        "chunk_size must be >= 1; got 0": lambda: Generator(model, n_pages=1, chunk_size=0),
        "cache must have the dtype of the keys": lambda: Generator(model_of(dtype=torch.float64), cache=cache),
        "cache holds 2 layers; the model has 1": lambda: of(cache=cache, n_layers=1),
        r"cache must have heads \(.*v_head_dim\)=\(4, 8, 8\); got \(2, 8, 8\)": lambda: of(None, cache, n_kv_heads=4),
        "model without relative positions": lambda: of(1, positions="relative"),
        "model without a context; got context_dim=8": lambda: of(1, context_dim=8),
        "causal=True and head=True": lambda: of(1, head=False),
        "prompt is empty": lambda: add([], 3),
        "prompt must be 1-D": lambda: add(draw(4)[None]),
        r"prompt must hold tokens in 0 .. 22; got 23": lambda: add([1, 23]),
        "max_new_tokens must be at least 0; got -1": lambda: add([1], -1),
        "temperature must be finite and >= 0": lambda: add([1], temperature=-1.0),
        "top_k must be >= 1": lambda: add([1], top_k=0),
        "top_p must be None or in": lambda: add([1], top_p=0.0),
        "stop_token must be None or in 0 .. 22; got 23": lambda: add([1], stop_token=23),
        "prefix_of must be the number of a request that was added before; got 0": lambda: add([1], prefix_of=0),
        "a prompt of 30 tokens and max_new_tokens=4 need 9 pages of 4 .*; the cache has 8": lambda: add(draw(30), 4),
        "60 tokens and max_new_tokens=5 do not fit": lambda: of(9, positions="learned").add(draw(60), 5),
        "exceed max_seq_len=64, beyond which dynamic scaling": lambda: of(9, rope_scaling=dynamic).add(draw(60), 5),
        "request must be one that is done and not fetched yet; got 0": lambda: generator.cancel(0),
    }  # fmt: skip
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    wrong = {
        "model must be a Transformer; got Linear": lambda: Generator(torch.nn.Linear(1, 1), n_pages=1),  # type: ignore[arg-type]
        "cache must be a PagedKVCache; got KVCache": lambda: Generator(model, cache=KVCache(model.config, 1)),  # type: ignore[arg-type]
        "n_pages must be an int": lambda: Generator(model, n_pages=2.0),  # type: ignore[arg-type]
        "prompt must be a 1-D integer tensor or a sequence of ints": lambda: generator.add("ab", 3),  # type: ignore[arg-type]
        "prompt must hold integers": lambda: generator.add(torch.ones(3), 3),
        "max_new_tokens must be an int": lambda: generator.add([1], 2.0),  # type: ignore[arg-type]
    }
    for message, call in wrong.items():
        with pytest.raises(TypeError, match=message):
            call()
    assert generator.waiting == ()
    generator.add(draw(29), 4)  # 32 positions, of which all 8 pages are full
    assert len(generator.run()[0]) == 33
