"""Packed documents as attention itself is told of them, where no patched model has read them for its masks.

So it is for a model that names "foundry" without a patch, and for a layer that is called by itself or computed again
for its gradient. What attention gets of the model's arguments is in its keyword arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from foundry_kernels.integrations.calls import assert_one_document, check_mask, current
from foundry_kernels.integrations.masks import (
    DENSE,
    KEYS,
    LAYOUT,
    dense_layout,
    keeps_apart,
    kind_of,
    marked,
    totals_of,
)
from foundry_kernels.integrations.packing import (
    LENGTHS,
    Documents,
    can_be_read,
    cut,
    from_begins,
    from_lengths,
    restarts,
    text_positions,
)


def documents_told(
    module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any], batch: int, queries: int, keys: int
) -> Documents | None:
    """Returns the documents that `mask` does not keep apart yet; None where there is one a row.

    Raises:
        ValueError: arguments contradict each other or the batch; or a model around `module` was told of documents that
            neither a mask nor an argument tells here.
    """
    if keeps_apart(mask):
        return None
    documents = None
    if any(kwargs.get(name) is not None for name in (*LENGTHS, "seq_idx")):
        documents = _remembered("lengths", kwargs, batch, queries, keys)
    call = current()
    running = call is not None and (call.batch, call.queries) == (batch, queries)
    if documents is None and queries > 1 and keys >= queries and not running:
        documents = _of_positions(mask, kwargs.get("position_ids"), batch, queries, keys)
    if documents is None and running and not getattr(module, "is_cross_attention", False):
        assert call is not None
        unaware = call.documents is not None and not (call.masked and mask is not None)
        if unaware and call.documents is not None:
            raise ValueError(
                f"{call.documents.given_by} gives several documents a row, of which the model tells "
                f"{type(module).__name__} nothing: they would see each other; pass one document a row"
            )
    return documents


def _of_positions(mask: Tensor | None, position_ids: Any, batch: int, queries: int, keys: int) -> Documents | None:
    positions = text_positions(position_ids, queries)
    if positions is None:
        return None
    if mask is not None and kind_of(mask) is None:
        if can_be_read(mask) and can_be_read(positions):
            check_mask(mask, positions.expand(batch, -1), keys - queries)
        return None
    if not can_be_read(positions):
        if kind_of(mask) is None:  # else its maker sees to it, or it is one of a static cache
            assert_one_document(None, positions)
        return None
    if keys != queries:
        return None  # a cache, of which nobody tells where its documents begin
    real = None
    if mask is not None and kind_of(mask) == KEYS:
        real = mask[:, 0, 0].expand(batch, -1)
    elif mask is not None and kind_of(mask) == DENSE:
        real = mask[:, 0].diagonal(dim1=-2, dim2=-1).expand(batch, -1)
    if real is not None:
        return from_begins(restarts(positions, real).expand(batch, -1), keys, "position_ids")
    return _remembered("positions", {"position_ids": positions}, batch, queries, keys)


def _remembered(what: str, given: dict[str, Any], batch: int, queries: int, keys: int) -> Documents | None:
    """Returns what arguments say of documents; all layers of a model get the same tensor, which is read once."""
    tensor = next(
        x for x in (given.get(n) for n in ("cu_seq_lens_q", "seq_idx", "position_ids", *LENGTHS)) if x is not None
    )
    able = isinstance(tensor, Tensor) and not is_compiling() and not tensor.is_inference()
    key = (what, batch, queries, keys, tensor._version) if able else None
    known = getattr(tensor, "_foundry_documents", None) if able else None
    if known is not None and known[0] == key:
        found: Documents | None = known[1]
        return found
    if what == "lengths":
        found = from_lengths(given, batch, queries, keys)
    else:
        found = from_begins(restarts(tensor).expand(batch, -1), keys, "position_ids")
    if able:
        tensor._foundry_documents = (key, found)
    return found


def apart(
    mask: Tensor | None, documents: Documents, keys: int, causal: bool, window: int | None
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """Returns `mask` made to keep `documents` apart, as one of these: a mask, or the running totals of sequences.

    causal, window: what goes with a mask of keys.
    """
    kind = kind_of(mask)
    if mask is None or kind not in (LAYOUT, KEYS, DENSE, None):
        return None, (documents.totals_q, documents.totals_k)
    if kind == LAYOUT and can_be_read(mask):
        return None, cut(totals_of(mask), documents, keys)
    same = documents.same(keys)
    if kind == LAYOUT:
        seen = dense_layout(totals_of(mask), documents.batch, documents.queries, keys, window)
        return marked(seen & same, DENSE, apart=True), None
    if kind == KEYS:
        right = 0 if causal else window
        totals = documents.totals_q, documents.totals_k
        seen = dense_layout(totals, documents.batch, documents.queries, keys, window, right)
        return marked(seen & mask, DENSE, apart=True), None
    if mask.dtype == torch.bool:
        return marked(mask & same, DENSE, apart=True), None
    return mask.masked_fill(~same, -torch.inf), None
