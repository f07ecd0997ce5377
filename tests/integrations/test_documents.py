"""Masks of packed documents, pair by pair, against their definition."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.integrations.attention.documents import Documents
from foundry_kernels.integrations.attention.patterns import within
from foundry_kernels.integrations.attention.plan import AttentionPlan

#: The lengths of the documents of two rows, and each token's document and place in it.
LENGTHS = ((5, 2, 1), (1, 7))
PLACES = torch.tensor([[i for n in lengths for i in range(n)] for lengths in LENGTHS])
DOCUMENTS = Documents.of_begins(PLACES[:, 1:] == 0, "position_ids")
NUMBERS = (PLACES == 0).cumsum(1)
SAME = NUMBERS[:, :, None] == NUMBERS[:, None]


def test_chunks_begin_with_each_document_of_each_row() -> None:
    def chunked(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query // 3 == key // 3) & (key <= query)

    assert DOCUMENTS is not None
    row, query, key = torch.meshgrid(torch.arange(2), torch.arange(8), torch.arange(8), indexing="ij")
    q, k = PLACES[:, :, None], PLACES[:, None]
    for anew, expected in ((True, SAME & chunked(row, row, q, k)), (False, SAME & chunked(row, row, query, key))):
        assert torch.equal(within(chunked, DOCUMENTS, 0, 0, 8, anew)(row, row, query, key), expected)


def test_padding_and_documents_on_a_cache_with_room() -> None:
    """Keys that do not exist yet are in no document; the padding's sequences and the documents are in order."""
    room = 12
    present = torch.ones(2, room, dtype=torch.bool)
    present[1, :3] = False
    given: dict[str, Any] = {"batch": 2, "first": 0, "queries": 8, "keys": room, "device": "cpu"}
    plan = AttentionPlan.of_padding(present, **given, traced=False).separated(DOCUMENTS, room)
    seen = plan.as_dense(2, 8, room, "cpu")[:, 0]
    expected = SAME.tril() & present[:, None, :8]
    real = present[:, :8]
    assert torch.equal(seen[..., :8][real], expected[real])
    assert not seen[..., 8:][real].any()
