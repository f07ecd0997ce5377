"""flash-attn's functions on caches in pages: against the same call on a contiguous cache, and what is written where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_loops import draw, over_backends
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.compat import flash_attn_3, flash_attn_varlen_func, flash_attn_with_kvcache, varlen_attn

BATCH, SIZE = 3, 52
COS, SIN = (table.float() for table in fk.rope_table(6, SIZE))
PAGE_SIZES = (1, 3, 16, 17, 64, 256)


def table_of(page_size: int, length: int = SIZE, batch: int = BATCH) -> Tensor:
    """Pages in a random order, two of them nobody's."""
    columns = -(-length // page_size)
    pages = torch.randperm(batch * columns + 2, generator=torch.Generator().manual_seed(page_size))
    return pages[: batch * columns].view(batch, columns).to(torch.int32)


def in_pages(cache: Tensor, table: Tensor, page_size: int) -> Tensor:
    """The rows of a cache ``[B, S, Hk, D]`` in pages; NaN where there is none."""
    pages = cache.new_full((int(table.max()) + 3, page_size, *cache.shape[2:]), torch.nan)
    for row, of_row in zip(cache, table.tolist(), strict=True):
        for i, page in enumerate(of_row):
            part = row[i * page_size : (i + 1) * page_size]
            pages[page, : len(part)] = part
    return pages


def rows_of(pages: Tensor, table: Tensor) -> Tensor:
    return pages[table.long()].flatten(1, 2)[:, :SIZE]


CALLS: dict[str, dict[str, Any]] = {
    "read": {"lengths": [52, 0, 1]},
    "decode": {"lengths": [51, 0, 17], "new": 1},
    "chunk": {"lengths": [3, 40, 16], "new": 5, "causal": True},
    "rotary": {"lengths": [3, 40, 16], "new": 2, "rotary": True, "causal": True},
    "rotary-no-mask": {"lengths": [3, 40, 16], "new": 2, "tokens": 3, "rotary": True},
    "leftpad": {"lengths": [20, 40, 16], "new": 1, "leftpad": [18, 0, 16], "causal": True},
    "options": {"lengths": [20, 40, 16], "new": 2, "window_size": (9, 0), "softcap": 3.0, "alibi_slopes": True},
}


@over_backends
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_as_on_a_contiguous_cache(backend: str, page_size: int, call: dict[str, Any]) -> None:
    """Bit for bit, and so is what the cache holds afterwards; all else in the pages is as it was."""
    given = dict(call)
    new, lengths = given.pop("new", 0), torch.tensor(given.pop("lengths"))
    q = draw(BATCH, given.pop("tokens", max(new, 1)), 4, 8, seed=1, dtype=torch.float32)
    k_cache, v_cache = (draw(BATCH, SIZE, 2, d, seed=d, dtype=torch.float32) for d in (8, 5))
    if new:
        given |= {name: draw(BATCH, new, 2, d, seed=20 + d, dtype=torch.float32) for name, d in (("k", 8), ("v", 5))}
    if given.pop("rotary", False):
        given |= {"rotary_cos": COS, "rotary_sin": SIN}
    if "leftpad" in given:
        given["cache_leftpad"] = torch.tensor(given.pop("leftpad"))
    if given.get("alibi_slopes"):
        given["alibi_slopes"] = 2.0 ** -torch.arange(1.0, 13.0).view(BATCH, 4)
    given |= {"cache_seqlens": lengths, "return_softmax_lse": True, "backend": backend}
    table = table_of(page_size)
    k_pages, v_pages = (in_pages(x, table, page_size) for x in (k_cache, v_cache))
    spare = torch.ones(len(k_pages), dtype=torch.bool)
    spare[table.long().flatten()] = False
    found = flash_attn_with_kvcache(q, k_pages, v_pages, block_table=table, **given)
    expected = flash_attn_with_kvcache(q, k_cache, v_cache, **given)
    assert all(map(torch.equal, found, expected))
    assert torch.equal(rows_of(k_pages, table), k_cache)
    assert torch.equal(rows_of(v_pages, table), v_cache)
    assert k_pages[spare].isnan().all()


@over_backends
def test_sequences_choose_rows_of_the_table(backend: str) -> None:
    table, rows = table_of(16), torch.tensor([2, 0])
    k_cache, v_cache = (draw(BATCH, SIZE, 2, 8, seed=d, dtype=torch.float32) for d in (1, 2))
    q, new = (draw(2, 1, h, 8, seed=h, dtype=torch.float32) for h in (4, 2))
    lengths = torch.tensor([7, 40])
    pages = [in_pages(x, table, 16) for x in (k_cache, v_cache)]
    given: dict[str, Any] = {"cache_seqlens": lengths, "cache_batch_idx": rows, "backend": backend}
    found = flash_attn_with_kvcache(q, pages[0], pages[1], new, new, block_table=table, **given)
    assert torch.equal(found, flash_attn_with_kvcache(q, k_cache, v_cache, new, new, **given))
    assert torch.equal(rows_of(pages[0], table), k_cache)


@over_backends
@pytest.mark.parametrize("paged", [True, False], ids=["pages", "rows"])
def test_packed_queries_and_new_keys(backend: str, paged: bool) -> None:
    """FlashAttention 3's: prompts beside single tokens, each as in a call of its own."""
    queries, lengths = [5, 1, 2], [0, 40, 9]
    cu = torch.tensor([0, 5, 6, 8], dtype=torch.int32)
    q, k, v = (draw(8, h, 8, seed=n, dtype=torch.float32) for n, h in ((1, 4), (2, 2), (3, 2)))
    caches = [draw(BATCH, SIZE, 2, 8, seed=d, dtype=torch.float32) for d in (4, 5)]
    table = table_of(16)
    pages = [in_pages(x, table, 16) if paged else x.clone() for x in caches]
    given: dict[str, Any] = {"rotary_cos": COS, "rotary_sin": SIN, "causal": True, "backend": backend}
    out, lse = flash_attn_3.flash_attn_with_kvcache(
        q, pages[0], pages[1], k, v, cache_seqlens=torch.tensor(lengths), page_table=table if paged else None,
        cu_seqlens_q=cu, cu_seqlens_k_new=cu, return_softmax_lse=True, **given,
    )  # fmt: skip
    for n, (tokens, length) in enumerate(zip(q.split(queries), lengths, strict=True)):
        part = slice(int(cu[n]), int(cu[n + 1]))
        rows = [x[n : n + 1] for x in caches]
        found, of_row = flash_attn_3.flash_attn_with_kvcache(
            tokens[None], rows[0], rows[1], k[part][None], v[part][None], cache_seqlens=length,
            return_softmax_lse=True, **given,
        )  # fmt: skip
        torch.testing.assert_close(out[part], found[0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(lse[:, part], of_row[0], rtol=1e-5, atol=1e-6)
    for x, expected in zip(pages, caches, strict=True):
        assert torch.equal(rows_of(x, table) if paged else x, expected)


def test_packed_functions_take_a_table() -> None:
    """flash-attn's, by cumulative lengths, and PyTorch's, by used ones."""
    cache, table = draw(BATCH, SIZE, 2, 8, seed=1, dtype=torch.float32), table_of(16)
    pages, q = in_pages(cache, table, 16), draw(9, 2, 8, seed=2, dtype=torch.float32)
    cu_q, used = torch.tensor([0, 4, 5, 9], dtype=torch.int32), torch.tensor([20, 52, 4], dtype=torch.int32)
    cu_k = torch.tensor([0, 20, 72, 76], dtype=torch.int32)
    keys = torch.cat([row[:n] for row, n in zip(cache, used.tolist(), strict=True)])
    expected = flash_attn_varlen_func(q, keys, keys, cu_q, cu_k, 4, 52, causal=True)
    found = flash_attn_varlen_func(
        q, pages, pages, cu_q, cu_k, 4, 52, causal=True, block_table=table, return_attn_probs=True
    )
    assert torch.equal(found[0], expected)
    assert found[2] is None
    of_torch = varlen_attn(q, pages, pages, cu_q, None, 4, 52, window_size=(-1, 0), seqused_k=used, block_table=table)
    assert torch.equal(of_torch, expected)


def test_caches_may_lie_between_each_other() -> None:
    """Pages of keys and values in turns, and rows side by side: of which no element is of both."""
    q, new, table = torch.ones(2, 1, 4, 8), torch.full((2, 1, 2, 8), 2.0), torch.tensor([[0, 1], [2, 3]]).int()
    for k_cache, v_cache in (torch.zeros(6, 2, 4, 2, 8).unbind(1), torch.zeros(6, 4, 2, 16).chunk(2, -1)):
        given: dict[str, Any] = {"block_table": table, "cache_seqlens": torch.tensor([5, 6])}
        flash_attn_with_kvcache(q, k_cache, v_cache, new, new, **given)
        assert k_cache[1, 1].eq(2).all()
        assert v_cache[3, 2].eq(2).all()
        assert int(k_cache.count_nonzero()) == int(v_cache.count_nonzero()) == new.numel()
