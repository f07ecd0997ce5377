"""States of linear attention beside pages: each sequence keeps its own, whatever comes, goes and fails beside it."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from tiny_model import HYBRID, HYBRIDS, TINY, draw, make
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.models import Generator, OutOfPages, PagedKVCache, Transformer

EVERY = pytest.mark.parametrize("name", [name for name, of in HYBRIDS.items() if of.linear_layers])


def row(length: int, seed: int = 0) -> Tensor:
    return draw(1, length, seed)


def alone(model: Transformer, tokens: Tensor, count: int) -> Tensor:
    """The logits of the last `count` of the tokens ``[1, T]``."""
    with torch.no_grad():
        return model(tokens)[0, -count:]


@EVERY
@torch.no_grad()
def test_sequences_in_any_order_keep_their_states(name: str) -> None:
    """Random batches of some of the sequences, packed or as rows, while others come, go and fork."""
    model, draws = make(HYBRIDS[name], dtype=torch.float64).eval(), random.Random(3)
    cache = PagedKVCache(model.config, 60, 4, n_sequences=5, dtype=torch.float64)
    read: dict[int, Tensor] = {}
    for step in range(60):
        if read and (len(read) == 5 or draws.random() < 0.15):
            gone = draws.choice(list(read))
            cache.free(gone)
            del read[gone]
        elif read and draws.random() < 0.2:
            source = draws.choice(list(read))
            read[cache.fork(source)] = read[source]
        elif draws.random() < 0.5:
            read[cache.add()] = row(0)
        chosen = draws.sample(list(read), draws.randint(0, len(read)))
        if not chosen:
            continue
        counts = [draws.choice([1, 1, 5, 0]) for _ in chosen] if step % 3 else [1 + step % 2] * len(chosen)
        if any(read[s].shape[1] + n > model.config.max_seq_len for s, n in zip(chosen, counts, strict=True)):
            continue
        parts = [row(n, seed=100 * step + at) for at, n in enumerate(counts)]
        batch, bounds = cache.batch(chosen), torch.tensor([0, *counts]).cumsum(0)
        if sum(counts) == 0:
            continue
        if step % 3:
            found = list(model(torch.cat(parts, 1), cache=batch, cu_seqlens=bounds)[0].split(counts))
        else:
            found = list(model(torch.cat(parts), cache=batch))
        for sequence, part, logits in zip(chosen, parts, found, strict=True):
            read[sequence] = torch.cat([read[sequence], part], 1)
            if part.shape[1]:
                expected = alone(model, read[sequence], part.shape[1])
                torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
    assert cache.batch(list(read)).lengths == [tokens.shape[1] for tokens in read.values()]


@torch.no_grad()
def test_a_slot_begins_with_zeros() -> None:
    model = make(HYBRID).eval()
    cache = PagedKVCache(HYBRID, 9, 4, n_sequences=2)
    first, second = cache.add(), cache.add()
    model(draw(2, 5), cache=cache)
    for message in (r"n_sequences=2, and all are in use",) * 2:
        with pytest.raises(OutOfPages, match=message):
            cache.add()
        with pytest.raises(OutOfPages, match=message):
            cache.fork(first)
    assert cache.sequences == (first, second)
    with pytest.raises(OutOfPages):
        model.generate([[1], [2]], 3, cache=cache)
    cache.free(first)
    with pytest.raises(OutOfPages):
        model.generate([[1], [2]], 3, cache=cache)
    assert cache.sequences == (second,)
    third = cache.add()
    found = model(row(6, 2), cache=cache.batch([third]))[0]
    torch.testing.assert_close(found, alone(model, row(6, 2), 6), rtol=1e-4, atol=1e-4)
    cache.truncate(third, 6)
    cache.truncate(third, 0)
    found = model(row(4, 3), cache=cache.batch([third]))[0]
    torch.testing.assert_close(found, alone(model, row(4, 3), 4), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="length must be 0 or stay 4: the state of linear attention does not go back"):
        cache.truncate(third, 3)
    assert "of linear attention=2, n_pages=9, page_size=4, n_kv_heads=2, head_dim=4, sequences=2/2" in repr(cache)


@torch.no_grad()
def test_a_pass_that_fails_spoils_only_its_own_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(HYBRID).eval()
    cache = PagedKVCache(HYBRID, 12, 4, n_sequences=4)
    first, second = cache.add(), cache.add()
    model(draw(2, 5), cache=cache)
    with pytest.raises(OutOfPages):
        model(row(40), cache=cache.batch([second]))
    monkeypatch.setattr(model.layers[2].feed_forward, "forward", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(row(3), cache=cache.batch([second]))
    monkeypatch.undo()
    copy = cache.fork(second)
    for spoilt in (second, copy):
        with pytest.raises(ValueError, match=f"sequence {spoilt} has states of a forward pass that failed"):
            model(row(3), cache=cache.batch([spoilt]))
    found = model(row(3, 1), cache=cache.batch([first]))[0]
    torch.testing.assert_close(found, alone(model, torch.cat([draw(2, 5)[:1], row(3, 1)], 1), 3), rtol=1e-4, atol=1e-4)
    cache.truncate(second, 0)
    cache.free(copy)
    model(draw(2, 5)[1:], cache=cache.batch([second]))
    found = model(row(3), cache=cache.batch([second]))[0]
    torch.testing.assert_close(found, alone(model, torch.cat([draw(2, 5)[1:], row(3)], 1), 3), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_steps_overwrite_the_states_in_place() -> None:
    """One token of each sequence is a step of N rows on a view of the states, and nothing moves between two steps. When
    a sequence has left, the others close the gap."""
    model = make(HYBRID).eval()
    cache = PagedKVCache(HYBRID, 20, 4, n_sequences=4)
    sequences = [cache.add() for _ in range(4)]
    model(draw(4, 3), cache=cache)
    seen: list[tuple[tuple[int, ...], int]] = []

    def look(module: Any, args: Any, options: Any) -> None:
        seen.append((tuple(args[0].shape), options["state"].recurrent.data_ptr()))

    handle = model.layers[0].attention.register_forward_pre_hook(look, with_kwargs=True)
    states = cache._states.layers[0].recurrent  # type: ignore[union-attr]
    rows = states.stride(0) * states.element_size()
    ones = torch.arange(5)
    model(draw(1, 4), cache=cache, cu_seqlens=ones)
    model(draw(4, 1), cache=cache)
    model(draw(1, 2), cache=cache.batch(sequences[1:3]), cu_seqlens=ones[:3])
    assert seen == [((4, 1, 16), states.data_ptr())] * 2 + [((2, 1, 16), states.data_ptr() + rows)]
    cache.free(sequences[1])
    model(draw(1, 3), cache=cache, cu_seqlens=ones[:4])
    handle.remove()
    assert seen[3] == ((3, 1, 16), states.data_ptr())


@EVERY
def test_what_the_states_cost(name: str) -> None:
    of = HYBRIDS[name]
    for dtype in (torch.float32, torch.bfloat16):
        cache = PagedKVCache(of, 12, 4, n_sequences=3, dtype=dtype)
        held = [*cache.k, *cache.v, *cache._states.tensors]  # type: ignore[union-attr]
        assert sum(x.untyped_storage().nbytes() for x in held) == of.cache_bytes(3, 16, dtype)


@EVERY
@pytest.mark.parametrize("chunk_size", [3, 64])
def test_more_requests_than_states(name: str, chunk_size: int) -> None:
    """They wait, whether the batch or the cache is the limit, and slots are used again."""
    model, lengths = make(HYBRIDS[name], "auto").eval(), (5, 1, 9, 2, 7, 3, 4)
    expected = [model.generate(row(n, n), 2 + n % 4)[0] for n in lengths]
    own = PagedKVCache(model.config, 60, 4, n_sequences=3)
    other = own.add()
    with torch.no_grad():
        model(row(4), cache=own)
    model.train()
    for options in ({"n_pages": 60, "page_size": 4, "max_batch": 2}, {"cache": own, "max_batch": 5}):
        serving = Generator(model, chunk_size=chunk_size, **options)  # type: ignore[arg-type]
        numbers = [serving.add(row(n, n)[0], 2 + n % 4) for n in lengths]
        most = 0
        while serving.running or serving.waiting:
            serving.step()
            most = max(most, len(serving.running))
        assert most == 2
        for number, tokens in zip(numbers, expected, strict=True):
            assert torch.equal(serving.result(number), tokens)
    assert model.training
    assert own.sequences == (other,)
    with torch.no_grad():
        found = model.eval()(row(2, 9), cache=own)[0]
    torch.testing.assert_close(found, alone(model, torch.cat([row(4), row(2, 9)], 1), 2), rtol=1e-4, atol=1e-4)


def test_slots_of_others_are_waited_for() -> None:
    model = make(HYBRID).eval()
    cache = PagedKVCache(HYBRID, 20, 4, n_sequences=1)
    other, serving = cache.add(), Generator(model, cache=cache)
    number = serving.add([1, 2, 3], 4)
    with pytest.raises(OutOfPages, match="n_sequences=1, and all are in use"):
        serving.step()
    assert serving.waiting == (number,)
    cache.free(other)
    assert torch.equal(serving.run()[number], model.generate([[1, 2, 3]], 4)[0])


def test_a_prefix_is_read_again() -> None:
    model = make(HYBRID).eval()
    serving = Generator(model, n_pages=40, page_size=2)
    first = serving.add(row(9)[0], 6)
    serving.step()
    second = serving.add(row(9)[0], 6, prefix_of=first)
    serving.step()
    tables = [serving.cache.block_table(sequence) for sequence in serving.cache.sequences]
    assert not set(tables[0]) & set(tables[1])
    found = serving.run()
    assert torch.equal(found[first], found[second])
    assert torch.equal(found[first], model.generate(row(9), 6)[0])


@pytest.mark.parametrize("invariant", [False, True])
def test_log_probs_of_requests(invariant: bool) -> None:
    """They are those of the whole sequence, up to rounding."""
    if invariant and extension.MISSING is not None:
        pytest.skip("batch-invariant linear layers need the compiled extension")
    model, lengths = make(HYBRIDS["qwen"], "auto").eval(), (5, 1, 9, 2)
    handle = fk.batch_invariant() if invariant else None
    try:
        serving = Generator(model, n_pages=40, page_size=4, max_batch=3, chunk_size=4)
        asked: Any = {"return_log_probs": True, "log_probs_temperature": 0.8, "temperature": 1.0}
        numbers = [serving.add(row(n, n)[0], 6, **asked, generator=torch.Generator().manual_seed(n)) for n in lengths]
        rows = serving.run()
        for number, n in zip(numbers, lengths, strict=True):
            tokens, found = rows[number][None], serving.log_probs(number)
            expected = model.log_probs(tokens[:, :-1], tokens[:, 1:], temperature=0.8)[0, n - 1 :]
            assert found.shape == (6,)
            torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)
    finally:
        if handle is not None:
            handle.undo()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_of_states(dtype: torch.dtype) -> None:
    """Also under autocast, whose dtype the convolution's inputs have."""
    model = make(HYBRID, "auto", dtype=dtype if dtype == torch.float64 else torch.float32).eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        serving = Generator(model, n_pages=9, page_size=4)
        numbers = [serving.add(row(n, n)[0], 4) for n in (5, 2)]
        found = serving.run()
        states = serving.cache._states.tensors  # type: ignore[union-attr]
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert {x.dtype for x in states} == {dtype, wide}
        for number, n in zip(numbers, (5, 2), strict=True):
            assert torch.equal(found[number], model.generate(row(n, n), 4)[0])


def test_sizes_that_are_refused() -> None:
    refused = {
        "n_sequences must be given for a model with linear attention; got None": lambda: PagedKVCache(HYBRID, 4),
        "n_sequences must be None without linear attention; got 2": lambda: PagedKVCache(TINY, 4, n_sequences=2),
        "n_sequences must be >= 1; got 0": lambda: PagedKVCache(HYBRID, 4, n_sequences=0),
    }
    for message, call in refused.items():
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match=r"cache must have heads \(.*, v_head_dim\)=\(2, 4, 4\); got \(4, 4, 4\)"):
        Generator(make(HYBRID), cache=PagedKVCache(dataclasses.replace(HYBRID, n_kv_heads=4), 4, n_sequences=1))
    assert PagedKVCache(HYBRIDS["only linear"], 4, n_sequences=1).k[0].numel() == 0
