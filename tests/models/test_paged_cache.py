"""A cache in pages: the pages' bookkeeping against plain lists, and the model's tokens against those of a KVCache."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from foundry_kernels.core.registry import OPS
from foundry_kernels.models import KVCache, ModelConfig, OutOfPages, PagedKVCache, Transformer
from foundry_kernels.models.pages import Pages

BACKENDS = ("reference", *(("native",) if "native" in OPS["flash_attention"].backends("cpu") else ()))
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 23, "max_seq_len": 64, "init_std": 0.4}
CONFIGS = {
    "llama": ModelConfig(**SHAPE),  # type: ignore[arg-type]
    "learned": ModelConfig(**SHAPE, positions="learned"),  # type: ignore[arg-type]
    "alibi-window": ModelConfig(**SHAPE, positions="alibi", sliding_window=5),  # type: ignore[arg-type]
    "qk-norm": ModelConfig(**SHAPE, qk_norm=True),  # type: ignore[arg-type]
    "post": ModelConfig(**SHAPE, norm_placement="post"),  # type: ignore[arg-type]
    "hybrid": ModelConfig(**SHAPE, layer_types=("linear_attention", "full_attention")),  # type: ignore[arg-type]
}


def model_of(name: str = "llama", backend: str = BACKENDS[-1]) -> Transformer:
    model = Transformer(CONFIGS[name], backend)
    model.init_weights(torch.Generator().manual_seed(1))
    return model.eval()


def pages_of(model: Transformer, n_pages: int, page_size: int, n_sequences: int = 6) -> PagedKVCache:
    states = n_sequences if model.config.linear_layers else None
    return PagedKVCache(model.config, n_pages, page_size, n_sequences=states)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(23, shape, generator=torch.Generator().manual_seed(seed))


# --- pages ------------------------------------------------------------------------------------------------------------


class Memory:
    """`Pages` with the numbers that are in them, and beside it each sequence as a list: the model of it."""

    def __init__(self, n_pages: int, size: int) -> None:
        self.pages, self.size = Pages(n_pages, size), size
        self.stored = [[None] * size for _ in range(n_pages)]
        self.expected: dict[int, list[int]] = {}
        self.written = 0

    def append(self, counts: dict[int, int]) -> None:
        before = {s: (self.pages.length(s), self.pages.table(s)) for s in self.expected}
        try:
            pairs = self.pages.reserve(counts)
        except OutOfPages:
            assert {s: (self.pages.length(s), self.pages.table(s)) for s in self.expected} == before
            return
        for old, new in pairs:
            self.stored[new] = list(self.stored[old])
        slots = set()
        for sequence, count in counts.items():
            length, table = self.pages.length(sequence), self.pages.table(sequence)
            for position in range(length, length + count):
                page = table[position // self.size]
                assert self.pages.references(page) == 1, "a page that is written to has one owner"
                assert (page, position % self.size) not in slots, "written twice"
                slots.add((page, position % self.size))
                self.stored[page][position % self.size] = self.written
                self.expected[sequence].append(self.written)
                self.written += 1
        self.pages.advance(counts)

    def read(self, sequence: int) -> list[int]:
        table = self.pages.table(sequence)
        return [self.stored[table[p // self.size]][p % self.size] for p in range(self.pages.length(sequence))]

    def check(self) -> None:
        owners = [page for s in self.expected for page in self.pages.table(s)]
        assert all(self.pages.references(page) == owners.count(page) for page in range(self.pages.n_pages))
        assert self.pages.n_free == self.pages.n_pages - len(set(owners)), "a page leaked"
        assert self.pages.sequences == tuple(self.expected)
        for sequence, expected in self.expected.items():
            assert self.read(sequence) == expected


@pytest.mark.parametrize(("n_pages", "size"), [(1, 1), (12, 1), (9, 3), (20, 4)])
def test_no_page_is_leaked_or_written_twice(n_pages: int, size: int) -> None:
    """2,500 random operations each: what sequences hold is what plain lists do, whenever there are pages, and without
    them nothing changes."""
    draws, memory = random.Random(n_pages), Memory(n_pages, size)
    for _ in range(2500):
        alive = list(memory.expected)
        kind = draws.choice(["add", "append", "append", "append", "fork", "free", "truncate"]) if alive else "add"
        one = draws.choice(alive) if alive else -1
        if kind == "add" and len(alive) < 6:
            memory.expected[memory.pages.add()] = []
        elif kind == "append":
            chosen = draws.sample(alive, draws.randint(1, len(alive)))
            memory.append({sequence: draws.randint(0, 2 * size) for sequence in chosen})
        elif kind == "fork" and len(alive) < 6:
            memory.expected[memory.pages.fork(one)] = list(memory.expected[one])
        elif kind == "free":
            memory.pages.free(one)
            del memory.expected[one]
        elif kind == "truncate":
            length = draws.randint(0, len(memory.expected[one]))
            memory.pages.truncate(one, length)
            del memory.expected[one][length:]
        memory.check()
    for sequence in list(memory.expected):
        memory.pages.free(sequence)
    assert memory.pages.n_free == n_pages


# --- the model --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_a_contiguous_cache(name: str) -> None:
    model, tokens = model_of(name), draw(2, 20)
    for page_size in (1, 3, 16, 64):
        contiguous, paged = model.make_cache(2), pages_of(model, 48, page_size)
        batch = paged.batch([paged.add(), paged.add()])
        with torch.no_grad():
            for begin, end in pairwise((0, 11, 12, 13, 20)):
                expected = model(tokens[:, begin:end], cache=contiguous)
                torch.testing.assert_close(model(tokens[:, begin:end], cache=batch), expected, rtol=1e-4, atol=1e-4)
        assert batch.lengths == [20, 20]


@pytest.mark.parametrize(("name", "backend"), [*(("llama", backend) for backend in BACKENDS), ("hybrid", "auto")])
def test_generation_gives_equal_tokens(name: str, backend: str) -> None:
    """Greedy and drawn, of prompts of several lengths, beside a sequence that stays as it is."""
    model, prompts = model_of(name, backend), [draw(n, seed=n) for n in (7, 1, 12)]
    cache = pages_of(model, 40, 3)
    other = cache.add()
    with torch.no_grad():
        model(draw(1, 4), cache=cache)

    def stored() -> list[Tensor]:
        states = [] if cache._states is None else [x[cache._states._slots[other]] for x in cache._states.tensors]
        pages = list(cache.block_table(other))
        return [*(x[pages].flatten(0, 1)[: cache.length(other)] for x in cache.k), *(x.clone() for x in states)]

    free, before = cache.n_free, stored()
    for options in ({}, {"temperature": 1.0}):
        found, expected = (
            model.generate(prompts, 9, generator=torch.Generator().manual_seed(3), cache=given, **options)
            for given in (cache, None)
        )
        assert all(map(torch.equal, found, expected))
        assert cache.n_free == free
    assert cache.sequences == (other,)
    assert all(map(torch.equal, stored(), before))


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_are_read_in_chunks_beside_decoding(name: str) -> None:
    """Sequences of different lengths, each with as many new tokens as it likes, in one call: as each alone."""
    model = model_of(name)
    cache = pages_of(model, 40, 4)
    rows = [draw(n, seed=n) for n in (21, 9, 30)]
    taken = [[0, 13, 20, 21], [0, 7, 8, 9], [0, 0, 17, 30]]
    batch = cache.batch([cache.add() for _ in rows])
    found: list[list[Tensor]] = [[] for _ in rows]
    with torch.no_grad():
        for step in range(3):
            parts = [row[at[step] : at[step + 1]] for row, at in zip(rows, taken, strict=True)]
            cu_seqlens = torch.tensor([0, *[len(part) for part in parts]]).cumsum(0)
            tokens = torch.cat(parts)[None]
            logits = model(tokens, cache=batch, cu_seqlens=cu_seqlens)
            for part, of_row in zip(logits[0].split([len(p) for p in parts]), found, strict=True):
                of_row.append(part)
        for row, of_row in zip(rows, found, strict=True):
            torch.testing.assert_close(torch.cat(of_row), model(row[None])[0], rtol=1e-4, atol=1e-4)
        copies = cache.batch([cache.fork(sequence) for sequence in batch.sequences])
        last = model(draw(1, 4), cache=batch, cu_seqlens=torch.tensor([0, 1, 3, 4]), last_only=True)
        assert last.shape == (1, 3, 23)
        every = model(draw(1, 4), cache=copies, cu_seqlens=torch.tensor([0, 1, 3, 4]))
        torch.testing.assert_close(last[0], every[0, [0, 2, 3]])


def test_a_fork_shares_pages_until_it_is_written_to() -> None:
    model, cache = model_of(), PagedKVCache(CONFIGS["llama"], 8, 4)
    prefix, ends = draw(1, 10), draw(2, 3, seed=1)
    first = cache.add()
    with torch.no_grad():
        model(prefix, cache=cache)
        second = cache.fork(first)
        assert cache.block_table(second) == cache.block_table(first)
        assert cache.n_free == 5
        logits = model(ends, cache=cache)  # both write to the third page, of which one gets a copy; and both take one
        assert cache.block_table(second)[:2] == cache.block_table(first)[:2]
        assert cache.n_free == 2
        whole = model(torch.cat([prefix.expand(2, -1), ends], 1))
        torch.testing.assert_close(logits, whole[:, 10:], rtol=1e-4, atol=1e-4)
        cache.free(first)
        again = model(ends[1:, :1], cache=cache.batch([second]))
        alone = model(torch.cat([prefix, ends[1:], ends[1:, :1]], 1))
    torch.testing.assert_close(again[:, 0], alone[:, -1], rtol=1e-4, atol=1e-4)


def test_without_pages_nothing_changes() -> None:
    model, cache = model_of(), PagedKVCache(CONFIGS["llama"], 3, 4)
    first, second = cache.add(), cache.add()
    with torch.no_grad():
        model(draw(2, 3), cache=cache)
        tables = [cache.block_table(s) for s in (first, second)]
        with pytest.raises(OutOfPages, match="the step needs 2 pages of 4 positions more, and 1 of 3 are free"):
            model(draw(2, 2), cache=cache)
        assert [cache.block_table(s) for s in (first, second)] == tables
        assert cache.batch().lengths == [3, 3]
        with pytest.raises(OutOfPages):
            model.generate([[1, 2]], 9, cache=cache)
        assert cache.sequences == (first, second)
        cache.free(second)
        model(draw(1, 2), cache=cache)
    assert cache.length(first) == 5


def test_a_pass_that_fails_leaves_the_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = model_of(), PagedKVCache(CONFIGS["llama"], 8, 4)
    sequence = cache.add()
    with torch.no_grad():
        model(draw(1, 3), cache=cache)
        monkeypatch.setattr(model.layers[1], "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(draw(1, 6), cache=cache)
        monkeypatch.undo()
        assert cache.length(sequence) == 3
        expected = model(torch.cat([draw(1, 3), draw(1, 6, seed=2)], 1))[:, 3:]
        torch.testing.assert_close(model(draw(1, 6, seed=2), cache=cache), expected, rtol=1e-4, atol=1e-4)
    cache.free(sequence)
    assert cache.n_free == 8


@torch.no_grad()
def test_bad_input() -> None:
    model, cache = model_of(), PagedKVCache(CONFIGS["llama"], 40, 4)
    first, second = cache.add(), cache.add()
    refused = {
        r"n_pages must be >= 1; got 0": lambda: PagedKVCache(model.config, 0),
        r"page_size must be >= 1; got 0": lambda: PagedKVCache(model.config, 1, 0),
        r"sequence must be one of the cache's, \[0, 1\]; got 7": lambda: cache.batch([first, 7]),
        r"sequences must differ": lambda: cache.batch([first, first]),
        r"length must be in 0 .. 0, that of sequence 1": lambda: cache.truncate(second, 1),
        r"cache's batch has 2 sequences; got tokens of 3": lambda: model(draw(3, 1), cache=cache),
        r"cache must have the dtype of the keys": lambda: model_of().double()(draw(2, 1), cache=cache),
        r"max_seq_len is 64": lambda: model_of("learned")(draw(2, 65), cache=PagedKVCache(CONFIGS["learned"], 40, 4)),
        r"does not support attn_mask": lambda: model(draw(2, 3), cache=cache, lengths=torch.tensor([1, 2])),
        r"compile must be False": lambda: model.generate([[1]], 2, cache=cache, compile=True),
        r"cu_seqlens and cache exclude each other unless": lambda: model(
            draw(1, 2), cache=KVCache(model.config, 1), cu_seqlens=torch.tensor([0, 2])
        ),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    assert cache.n_free == 40


def test_the_last_of_those_that_share_a_page_keeps_it() -> None:
    pages = Pages(3, 4)
    first = pages.add()
    pages.reserve({first: 3})
    pages.advance({first: 3})
    others = [pages.fork(first), pages.fork(first)]
    copied = pages.reserve(dict.fromkeys((first, *others), 1))
    assert (len(copied), pages.n_free) == (2, 0)
    assert len({pages.table(sequence) for sequence in (first, *others)}) == 3
