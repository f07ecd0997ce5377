"""Packed documents in the arguments of attention itself, for calls whose masks were not made by a patched model.

So it is for a model that names "foundry" without a patch, and for a layer that is called by itself or computed again
for its gradient. What attention gets of the model's arguments is in its keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from foundry_kernels.integrations.attention.call import assert_one_document, check_mask, current
from foundry_kernels.integrations.attention.documents import (
    LENGTHS,
    Documents,
    can_be_read,
    cut,
    from_begins,
    from_lengths,
    refuse_other_names,
    restarts,
    text_positions,
)
from foundry_kernels.integrations.attention.plan import (
    DENSE,
    KEYS,
    LAYOUT,
    UNREAD,
    dense_layout,
    keeps_apart,
    kind_of,
    marked,
    totals_of,
)


def documents_told(
    module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any], batch: int, queries: int, keys: int
) -> Documents | None:
    """Returns the documents that `mask` does not keep apart yet; None where there is one a row.

    Raises:
        ValueError: arguments contradict each other or the batch, or have the names of another package; or a model
            around `module` was told of documents that neither a mask nor an argument tells here.
    """
    refuse_other_names(kwargs)
    if keeps_apart(mask):
        return None
    sizes = (batch, queries, keys)
    if any(kwargs.get(name) is not None for name in (*LENGTHS, "seq_idx")):
        owner = kwargs.get("cu_seq_lens_q") if kwargs.get("cu_seq_lens_q") is not None else kwargs.get("seq_idx")
        return _once(owner, sizes, lambda: from_lengths(kwargs, *sizes))
    call = current()
    if call is None or (call.batch, call.queries) != (batch, queries):
        positions = text_positions(kwargs.get("position_ids"), queries)
        if positions is None or queries == 1 or keys < queries:
            return None
        return _of_positions(mask, positions, sizes)
    told = call.documents is None or (call.masked and mask is not None)
    if call.documents is not None and not told and not getattr(module, "is_cross_attention", False):
        raise ValueError(
            f"{call.documents.given_by} gives several documents per row, of which the model tells "
            f"{type(module).__name__} nothing: they would see each other; pass one document per row"
        )
    return None


def _of_positions(mask: Tensor | None, positions: Tensor, sizes: tuple[int, int, int]) -> Documents | None:
    batch, queries, keys = sizes
    kind = kind_of(mask)
    if not can_be_read(positions):
        if kind is None and mask is None:  # else its maker sees to it, or it is one of a static cache
            assert_one_document(None, positions)
        return None
    if mask is not None and kind is None:  # the caller's, which says all
        if can_be_read(mask):
            _once(mask, sizes, lambda: check_mask(mask, positions.expand(batch, -1), keys - queries))
        return None
    if keys != queries:
        return None  # a cache whose documents begin at unknown positions
    real = None
    if mask is not None and kind == KEYS:
        real = mask[:, 0, 0].expand(batch, -1)
    elif mask is not None and kind == DENSE:
        real = mask[:, 0].diagonal(dim1=-2, dim2=-1).expand(batch, -1)
    owner = positions if real is None else mask
    return _once(owner, sizes, lambda: from_begins(restarts(positions, real).expand(batch, -1), "position_ids"))


def _once(owner: Any, sizes: tuple[int, int, int], read: Callable[[], Documents | None]) -> Documents | None:
    """Returns what `read` does, which is kept with `owner`: all layers of a model get this one tensor, and the host
    waits for its values once."""
    if not isinstance(owner, Tensor) or is_compiling() or owner.is_inference():
        return read()
    key = (sizes, owner._version)
    known: Any = getattr(owner, "_foundry_documents", None)
    if known is None or known[0] != key:
        known = key, read()
        owner._foundry_documents = known  # type: ignore[attr-defined]
    found: Documents | None = known[1]
    return found


def apart(
    mask: Tensor | None, documents: Documents, keys: int, causal: bool, window: int | None
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """Returns `mask` made to keep `documents` apart, as one of these: a mask, or the running totals of sequences.

    causal, window: what goes with a mask of keys.
    """
    kind = kind_of(mask)
    if mask is None or kind == UNREAD:
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
