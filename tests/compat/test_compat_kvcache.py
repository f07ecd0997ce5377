"""flash-attn's function for generation, on a cache: against plain loops over sequences and heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_loops import EXACT, close, draw, of_sequence, over_backends, over_options, plain
from table import Allocations
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.compat import flash_attn_with_kvcache, paged_cache, qv

ROWS, SIZE = 5, 16


def caches(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return draw(ROWS, SIZE, 2, 8, seed=10, dtype=dtype), draw(ROWS, SIZE, 2, 5, seed=11, dtype=dtype)


def table(dtype: torch.dtype, width: int = 6) -> tuple[Tensor, Tensor]:
    cos, sin = fk.rope_table(width, SIZE)
    return cos.to(dtype), sin.to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """x [T, H, D] with token i rotated by the angles of row positions[i], pair by pair."""
    out, half = x.clone(), cos.shape[1]
    for token, position in enumerate(positions):
        for pair in range(half):
            a, b = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + half)
            c, s = cos[position, pair], sin[position, pair]
            out[token, :, a] = x[token, :, a] * c - x[token, :, b] * s
            out[token, :, b] = x[token, :, b] * c + x[token, :, a] * s
    return out


CACHE_CALLS: dict[str, dict[str, Any]] = {
    "read-only": {"lengths": [3, 16, 9]},
    "whole": {"lengths": None},
    "int": {"lengths": 7, "new": 2},
    "one-length": {"lengths": [7, 7, 7], "new": 2},
    "ragged": {"lengths": [3, 14, 0], "new": 2},
    "ragged-int64": {"lengths": [3, 14, 0], "new": 2, "index": torch.int64},
    "decode": {"lengths": [3, 15, 0], "new": 1, "tokens": 1},
    "fills-it": {"lengths": 14, "new": 2},
    "empty-without-new": {"lengths": [0, 4, 0]},
    "batch-idx": {"lengths": [3, 14, 0], "new": 2, "rows": [4, 0, 2]},
    "batch-idx-in-order": {"lengths": 4, "new": 2, "rows": [0, 1, 2]},
    "batch-idx-twice-read-only": {"lengths": [3, 14, 6], "rows": [4, 4, 2]},
    "leftpad": {"lengths": [5, 14, 2], "new": 2, "leftpad": [2, 13, 2]},
    "leftpad-alike": {"lengths": 6, "new": 2, "leftpad": [3, 3, 3]},
    "rotary": {"lengths": [3, 13, 0], "new": 2, "rotary": True},
    "rotary-int": {"lengths": 6, "new": 2, "rotary": True},
    "rotary-halves": {"lengths": [3, 13, 0], "new": 2, "rotary": False},
    "more-queries-than-keys": {"lengths": [3, 12, 0], "new": 1, "tokens": 3, "rotary": True},
    "more-keys-than-queries": {"lengths": [3, 12, 0], "new": 4, "tokens": 2, "rotary": True},
    "all": {"lengths": [5, 13, 3], "new": 2, "rows": [1, 4, 0], "leftpad": [0, 9, 3], "rotary": True},
}


@over_backends
@over_options
@pytest.mark.parametrize("call", CACHE_CALLS.values(), ids=CACHE_CALLS)
def test_kvcache(backend: str, options: dict[str, Any], call: dict[str, Any]) -> None:
    """Outputs, lse, what is in the cache afterwards, and that everything else in it is as it was."""
    dtype, tolerance = EXACT[backend]
    new, lengths, rotary = call.get("new", 0), call["lengths"], call.get("rotary")
    tokens, rows = call.get("tokens", max(new, 2)), call.get("rows")
    k_cache, v_cache = caches(dtype)
    if rows is None:
        k_cache, v_cache = k_cache[:3], v_cache[:3]
    q = draw(3, tokens, 4, 8, dtype=dtype)
    k, v = draw(3, new, 2, 8, seed=1, dtype=dtype), draw(3, new, 2, 5, seed=2, dtype=dtype)
    cos, sin = table(torch.float64 if dtype == torch.float64 else torch.float32)
    index = call.get("index", torch.int32)

    def integers(x: list[int] | None) -> Tensor | None:
        return None if x is None else torch.tensor(x, dtype=index)

    # What is expected, before anything is written.
    each = [SIZE] * 3 if lengths is None else [lengths] * 3 if isinstance(lengths, int) else lengths
    per_token = options.get("causal", False) or options.get("window_size", (-1, -1)) != (-1, -1)
    k_after, v_after, expected = k_cache.clone(), v_cache.clone(), []
    for n in range(3):
        row, begin, length = (rows or range(3))[n], (call.get("leftpad") or [0] * 3)[n], each[n]
        qn, kn = q[n], k[n]
        if rotary is not None:
            qn = rotate(qn, cos, sin, [length + (i if per_token else 0) for i in range(tokens)], rotary)
            kn = rotate(kn, cos, sin, [length + i for i in range(new)], rotary)
        k_after[row, length : length + new], v_after[row, length : length + new] = kn, v[n]
        keys, values = k_after[row, begin : length + new], v_after[row, begin : length + new]
        expected.append(plain(qn, keys, values, **of_sequence(options, n)))

    inputs = {"q": q.clone(), "k": k.clone(), "v": v.clone()}
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, *((k, v) if new else (None, None)), *((cos, sin) if rotary is not None else (None, None)),
        cache_seqlens=integers(lengths) if isinstance(lengths, list) else lengths, cache_batch_idx=integers(rows),
        cache_leftpad=integers(call.get("leftpad")), rotary_interleaved=bool(rotary), return_softmax_lse=True,
        backend=backend, **options,
    )  # fmt: skip
    assert out.shape == (3, tokens, 4, 5)
    assert out.is_contiguous()
    for n, (e, e_lse) in enumerate(expected):
        close(out[n], e, tolerance)
        close(lse[n], e_lse, tolerance)
    if rotary is None:
        assert torch.equal(k_cache, k_after)
    close(k_cache, k_after, tolerance)
    assert torch.equal(v_cache, v_after)
    assert all(torch.equal(a, inputs[name]) for name, a in (("q", q), ("k", k), ("v", v)))
    alone = flash_attn_with_kvcache(q, k_cache[:3], v_cache[:3], backend=backend)
    assert isinstance(alone, Tensor)


def test_kvcache_without_sequences() -> None:
    k_cache, v_cache = caches(torch.float32)
    q = torch.zeros(0, 2, 4, 8)
    out, lse = flash_attn_with_kvcache(q, k_cache[:0], v_cache[:0], cache_seqlens=3, return_softmax_lse=True)
    assert out.shape == (0, 2, 4, 5)
    assert lse.shape == (0, 4, 2)
    assert lse.dtype == torch.float32


@over_backends
@pytest.mark.parametrize("ragged", [False, True], ids=["one-length", "ragged"])
def test_the_cache_is_used_where_it_lies(backend: str, ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches lie in flash-attn's layout and in [B, Hk, S, D] memory: attention is given views of it, and a kernel makes
    no tensor as large as one sequence's part of it."""
    seen: list[Tensor] = []

    def record(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        seen.extend((k, v))
        return fk.flash_attention(q, k, v, **options)

    def record_packed(q: Tensor, k: Tensor, v: Tensor, *tables: Any, **options: Any) -> Any:
        seen.extend((k, v))
        return fk.flash_attention_varlen(q, k, v, *tables, **options)

    monkeypatch.setattr(qv, "flash_attention", record)
    monkeypatch.setattr(paged_cache, "flash_attention_varlen", record_packed)
    size = 4096
    for memory in ((2, size, 2, 64), (2, 2, size, 64)):
        k_cache, v_cache = (torch.randn(memory) for _ in range(2))
        storages = {x.untyped_storage().data_ptr() for x in (k_cache, v_cache)}
        if memory[1] == 2:
            k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
        q, k, v = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
        lengths = torch.tensor([4000, 3900 if ragged else 4000])
        seen.clear()
        with torch.no_grad(), Allocations() as made:
            flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True, backend=backend)
        assert {x.untyped_storage().data_ptr() for x in seen} == storages
        assert len(seen) == 2  # one call, whatever the lengths
        assert torch.equal(k_cache[0, 4000], k[0, 0])
        if backend != "reference":  # whose matmul copies what it cannot batch
            assert made.largest < 3900 * 2 * 64
