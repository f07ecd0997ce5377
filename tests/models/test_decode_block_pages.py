"""A whole block in one call over a cache in pages: the same bits as of its parts, and one token a sequence."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from blocks import CONFIGS, DTYPES, arguments, counted, draw_tokens, make
from table import cpu_setting
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core.extension import build_info
from foundry_kernels.models import PagedKVCache, Transformer
from foundry_kernels.nn import _linear_layers
from foundry_kernels.ops.decode_linear import MAX_ROWS

pytestmark = pytest.mark.skipif(_linear_layers.MISSING is not None, reason=str(_linear_layers.MISSING))

#: Positions that sequences hold before: their pages of three are full, begun and none.
LENGTHS = [(0,), (4, 9, 1), (5, 0, 12, 3, 7, 6, 2, 1), (*range(19),)]


@torch.no_grad()
def step(
    model: Transformer,
    lengths: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
    allowed: bool = True,
    together: bool = False,
    packed: bool = True,
    count: int = 1,
) -> tuple[list[Tensor], list[bool]]:
    """Logits of `count` tokens of each of the sequences, which have so many before, with all that is stored, and
    whether each block was one call."""
    generator = torch.Generator().manual_seed(4)
    cache = PagedKVCache(model.config, 90, 3, dtype=model.tok_embeddings.weight.dtype)
    for stored in (*cache.k, *cache.v):
        stored.copy_(torch.randn(stored.shape, generator=generator))
    pages = cache.add()
    cache.reserve({pages: 7})  # so that tables do not begin with the first page
    sequences = [cache.add() for _ in lengths]
    for sequence, length in zip(sequences, lengths, strict=True):
        cache.reserve({sequence: length})
        cache.advance({sequence: length})
    tokens = draw_tokens(len(lengths), count)
    given: dict[str, Any] = {"cu_seqlens": torch.arange(len(lengths) + 1) * count, "last_only": True} if packed else {}
    with counted(monkeypatch, allowed, together) as taken:
        logits = model(tokens.reshape(1, -1) if packed else tokens, cache=cache.batch(sequences), **given)
    return [logits, *cache.k, *cache.v], taken


def assert_same_bits(model: Transformer, lengths: Sequence[int], patch: pytest.MonkeyPatch) -> None:
    many = _linear_layers.batched_decode() if len(lengths) > MAX_ROWS else nullcontext()
    with many:
        for packed in (False, True):
            expected, never = step(model, lengths, patch, allowed=False, packed=packed)
            assert not any(never)
            for together in (False, True):
                got, taken = step(model, lengths, patch, together=together, packed=packed)
                assert taken == [len(lengths) <= _linear_layers.most_rows()] * len(model.layers)
                for one, other in zip(got, expected, strict=True):
                    assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_block_has_the_bits_of_its_parts(config: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(dtype, **CONFIGS[config])
    for lengths in LENGTHS:
        assert_same_bits(model, lengths, monkeypatch)


@pytest.mark.parametrize("isa", build_info().get("usable_instruction_sets", []))
def test_every_instruction_set_has_them(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with cpu_setting(isa, torch.get_num_threads()):
        for dtype in DTYPES:
            model = make(dtype, **CONFIGS["heads-of-96"])
            assert_same_bits(model, (50, 7), monkeypatch)
            assert_same_bits(model, range(12), monkeypatch)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_any_number_of_threads_has_them(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(**CONFIGS["threads"])
    with cpu_setting(build_info()["instruction_set"], threads):
        for _ in range(3):
            assert_same_bits(model, (100, 3, 31), monkeypatch)


@torch.no_grad()
def test_pages_give_what_dense_memory_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    for length in (1, 3, 11):
        tokens, pages = draw_tokens(1, length + 1), PagedKVCache(model.config, 9, 3)
        pages.add()
        found = []
        for cache in (model.make_cache(1), pages):
            model(tokens[:, :length], cache=cache)
            with counted(monkeypatch, together=True) as taken:
                found.append(model(tokens[:, length:], cache=cache))
            assert all(taken)
        torch.testing.assert_close(*found)


def test_where_no_block_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()

    def taken(lengths: Sequence[int] = (4, 2), model: Transformer = model, count: int = 1) -> bool:
        return any(any(step(model, lengths, monkeypatch, together=t, count=count)[1]) for t in (False, True))

    assert taken()
    assert not taken(count=2)
    assert not taken(range(9))
    assert not taken(model=make(qk_norm=True))
    with fk.batch_invariant():
        assert not taken()
    with _linear_layers.batched_decode():
        assert not taken((2,) * 33)


# --- the operator -----------------------------------------------------------------------------------------------------


def paged(**changes: Any) -> list[Any]:
    """Of the operator, for three sequences, in pages of four positions."""
    randn = torch.Generator().manual_seed(0)
    given: dict[str, Any] = {
        "branch": torch.randn(1, 3, 24, generator=randn), "stream": torch.randn(1, 3, 24, generator=randn),
        "k_cache": torch.zeros(9, 4, 2, 8), "v_cache": torch.zeros(9, 4, 2, 8), "start": 0,
        "block_table": ints([3, 0], [8, 1], [5, 2]), "lengths": ints(1, 4, 7),
    }  # fmt: skip
    return arguments(**given | changes)


def ints(*values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@torch.no_grad()
def test_the_operator_by_opcheck() -> None:
    torch.library.opcheck(torch.ops.foundry_kernels.decode_block.default, paged())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"lengths": None}, ValueError, "block_table must come with lengths"),
        ({"lengths": ints(1, 4)}, ValueError, r"lengths \[N\]"),
        ({"lengths": ints(1, 4, 9)}, ValueError, "lengths must be in 1 .. 8"),
        ({"lengths": ints(0, 4, 7)}, ValueError, "got 0 for sequence 0"),
        ({"cos": torch.ones(6, 4), "sin": torch.ones(6, 4)}, ValueError, "lengths must be in 1 .. 6"),
        ({"lengths": torch.tensor([1, 4, 7])}, TypeError, "must be int32"),
        ({"block_table": ints([3, 0], [8, 1], [5, 9])}, ValueError, "got 9 for page 1 of sequence 2"),
        ({"block_table": ints([3, 0], [-1, 1], [5, 2])}, ValueError, "got -1 for page 0 of sequence 1"),
        ({"start": 1}, ValueError, "start must be 0"),
        ({"stream": torch.ones(1, 33, 24), "branch": None, "block_table": torch.zeros(33, 1, dtype=torch.int32),
          "lengths": torch.ones(33, dtype=torch.int32)}, ValueError, "at most 32 rows"),
    ],
    ids=str,
)  # fmt: skip
@torch.no_grad()
def test_the_operator_refuses(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    args = paged(**changes)
    with pytest.raises(error, match=message):
        torch.ops.foundry_kernels.decode_block(*args)
    assert not args[6].any()
    assert not args[7].any()
