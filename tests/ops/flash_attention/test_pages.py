"""Keys and values in pages: the same bits as packed ones, read where they lie, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from table import Allocations
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.ops.flash_attention.cases_paged import BlockTable

VARLEN = fk.OPS["flash_attention_varlen"]
NATIVE = "native" in VARLEN.backends("cpu")
BACKENDS = ["reference", *(["native"] if NATIVE else []), *(["triton"] if "triton" in VARLEN.backends("cpu") else [])]
PAGE_SIZES = (1, 3, 16, 17, 64, 256)


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def paged_and_packed(
    lengths_q: list[int], lengths_k: list[int], page_size: int, dtype: torch.dtype, d: int = 32
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments of one call in both forms; what no sequence has in the pages is NaN."""
    keys, values = draw(sum(lengths_k), 2, d, seed=2, dtype=dtype), draw(sum(lengths_k), 2, d, seed=3, dtype=dtype)
    shared = {
        "q": draw(sum(lengths_q), 4, d, seed=1, dtype=dtype),
        "cu_seqlens_q": cumulative(lengths_q),
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    made = BlockTable(tuple(lengths_k), page_size)
    table = made(torch.Generator().manual_seed(page_size), (len(lengths_k), max(made.counts) + 1)).int()
    pages = [keys.new_full((made.n_pages, page_size, 2, d), torch.nan) for _ in range(2)]
    for x, of in zip((keys, values), pages, strict=True):
        for row, pages_of in zip(x.split(lengths_k), table.tolist(), strict=True):
            for page, part in zip(pages_of, row.split(page_size), strict=False):
                of[page, : len(part)] = part
    paged = {"k": pages[0], "v": pages[1], "cu_seqlens_k": None, "block_table": table}
    packed = {"k": keys, "v": values, "cu_seqlens_k": cumulative(lengths_k)}
    return shared | paged | {"seqused_k": torch.tensor(lengths_k).int()}, shared | packed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["decode", "chunks"])
def test_the_same_bits_as_packed_keys(backend: str, kind: str) -> None:
    """For every size of pages: the sums have the same order. Nothing that no sequence has is read into them."""
    few = backend == "triton" and _triton.INTERPRET
    lengths_q, lengths_k = ([1, 1, 1, 1], [70, 0, 1, 130]) if kind == "decode" else ([20, 3, 0], [33, 40, 7])
    for page_size in PAGE_SIZES[1:2] if few else PAGE_SIZES:
        for dtype in (torch.float32,) if few else (torch.float32, torch.bfloat16):
            paged, packed = paged_and_packed(lengths_q, lengths_k, page_size, dtype)
            options: dict[str, Any] = {"causal": True, "return_lse": True, "backend": backend}
            found = fk.flash_attention_varlen(**paged, **options)
            assert all(map(torch.equal, found, fk.flash_attention_varlen(**packed, **options)))


@pytest.mark.skipif(not NATIVE, reason="no native kernel")
@pytest.mark.parametrize("tokens", [1, 40])
def test_pages_are_read_where_they_lie(tokens: int) -> None:
    """Nothing is allocated that is as large as a sequence's keys, in however small pages."""
    paged, _ = paged_and_packed([tokens, tokens], [4000, 3900], 16, torch.bfloat16, 64)
    with torch.no_grad(), Allocations() as made:
        fk.flash_attention_varlen(**paged, causal=True, backend="native")
    assert made.largest < 3900 * 64


# --- refusals ---------------------------------------------------------------------------------------------------------

TABLE, USED = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32), torch.tensor([5, 6], dtype=torch.int32)
PAGES, Q, CU = torch.ones(4, 3, 2, 8), torch.ones(3, 4, 8), torch.tensor([0, 1, 3], dtype=torch.int32)


def call(**changed: Any) -> Callable[[], object]:
    given = {"q": Q, "k": PAGES, "v": PAGES, "cu_seqlens_q": CU, "cu_seqlens_k": None, "max_seqlen_q": 2}
    given |= {"max_seqlen_k": 6, "block_table": TABLE, "seqused_k": USED} | changed
    return lambda: fk.flash_attention_varlen(**given)


BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "page": (call(block_table=TABLE + 1), ValueError, r"block_table must be in 0 .. 3.*got 4 for page 1 of sequence 1"),
    "negative page": (call(block_table=TABLE - 1), ValueError, r"block_table must be in 0 .. 3.*got -1 for page 0"),
    "long": (
        call(seqused_k=USED + 1),
        ValueError,
        r"seqused_k must be in 0 .. 6, what block_table",
    ),
    "no lengths": (call(seqused_k=None), ValueError, r"one of cu_seqlens_k and seqused_k must be given.*got neither"),
    "both": (call(cu_seqlens_k=CU), ValueError, r"one of cu_seqlens_k and seqused_k must be given.*got both"),
    "cumulative": (
        call(seqused_k=None, cu_seqlens_k=torch.tensor([0, 7, 8])),
        ValueError,
        r"the lengths in cu_seqlens_k must be in 0 .. 6",
    ),
    "maximum": (call(max_seqlen_k=5), ValueError, r"max_seqlen_k must be at least the longest sequence, 6; got 5"),
    "leftpad": (call(leftpad_k=USED + 1), ValueError, r"leftpad_k must be in 0 .. seqused_k of each sequence"),
    "stride": (call(k=torch.ones(4, 3, 2, 16)[..., ::2]), ValueError, r"k must have a last stride of 1: pages"),
    "rank": (call(k=PAGES[0]), ValueError, r"k must be \[num_blocks, page_block_size, Hk, D\] with block_table"),
    "values": (call(v=PAGES[:3]), ValueError, r"v must have shape \(4, 3, 2, 8\)"),
    "no positions": (call(k=PAGES[:, :0], v=PAGES[:, :0]), ValueError, r"k must have pages of at least one position"),
    "dropout": (call(dropout_p=0.1), ValueError, r"dropout_p must be 0, and dropout_seed None, with block_table"),
    "mask": (call(attn_mask=torch.ones(1, 1)), ValueError, r"attn_mask must be None for packed sequences"),
    "without a table": (call(block_table=None), ValueError, r"seqused_k must be None without block_table"),
    "no keys": (call(block_table=None, seqused_k=None), TypeError, r"cu_seqlens_k must be a torch.Tensor"),
}


@pytest.mark.parametrize(("attempt", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(attempt: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attempt()
