"""What a mask function of transformers is made of, and what it says of neighbouring tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.integrations.attention.documents import Documents

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def neighbours(
    function: MaskFunction, batch: int, queries: int, first: int | Tensor, device: Any
) -> tuple[Tensor, Tensor]:
    """The values of a mask function for each query and the key before it, and for each query and the key after it.

    The two ``[B, T - 1]`` are enough to distinguish packed sequences, and masks that let a token see later ones, from a
    causal mask.
    """
    rows = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.long, device=device)[None, :, None, None]
    later = (torch.arange(1, queries, device=device) + first)[None, None, :, None]
    shape = (batch, queries - 1)
    before = function(rows, head, later, later - 1).expand(batch, 1, queries - 1, 1).reshape(shape)
    after = function(rows, head, later - 1, later).expand(batch, 1, queries - 1, 1).reshape(shape)
    return before, after


def blocks_in_window(function: MaskFunction) -> tuple[Tensor, int] | None:
    """(the block of each token ``[B, S]``, -1 for none; the window) of a mask that is causal except for blocks of
    tokens that see each other, within a sliding window, as Gemma 3 has it for images. None for any other mask.

    Ignores packed sequences around it; :func:`neighbours` finds these.
    """
    outer = _parts(unpacked(function), "and_masks").get("mask_functions", ())
    if len(outer) != 2:
        return None
    either = _parts(outer[0], "or_masks").get("mask_functions", ())
    window = _parts(outer[1], "sliding_window_overlay").get("sliding_window")
    if window is None or len(either) != 2 or getattr(either[0], "__name__", "") != "causal_mask_function":
        return None
    blocks = _parts(either[1], "blockwise_overlay").get("block_sequence_ids")
    return None if blocks is None else (blocks, window)


def unpacked(function: MaskFunction) -> MaskFunction:
    """Returns a mask function without transformers' separation of packed sequences."""
    outer = _parts(function, "and_masks").get("mask_functions", ())
    packed = [bool(_parts(part, "packed_sequence_mask_function")) for part in outer]
    if len(outer) == 2 and any(packed):
        function = outer[packed.index(False)]  # first or last, depending on the release
    return _parts(function, "remap_positions_for_packed_sequence").get("mask_function", function)


def _parts(function: Any, maker: str) -> dict[str, Any]:
    """The variables with which transformers' function `maker` made `function`; empty if another one made it."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return {}
    if not function.__qualname__.startswith(f"{maker}.<locals>."):
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}


def within(
    function: MaskFunction, documents: Documents, first: int | Tensor, begin: int, keys: int, anew: bool
) -> MaskFunction:
    """Returns a mask function of transformers that separates documents and, within a document, is `function`.

    first, begin: the places of the first query and of the first key in calls of the function. anew: whether `function`
    counts from the beginning of the document, which chunks need.
    """
    of_query, of_key = documents.of_queries(), documents.of_keys(keys)

    def same(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        document = of_query[batch, query - first]
        apart = document == of_key[batch, key - begin]
        if anew:
            start = documents.totals_q[document] - batch * documents.queries
            query, key = query - start, key - start
        return function(batch, head, query, key) & apart

    return same
