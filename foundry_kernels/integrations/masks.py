"""Masks of transformers, as what a kernel can skip.

transformers describes a mask by a function of (batch, head, query, key) and a padding mask. What the kernels know is
causal, a window, and packed sequences; so a batch with padding becomes one of packed sequences, without moving
anything: the tokens of all rows, one row after the other, are cut into those before, inside and after the row's real
tokens. Those outside are sequences too, of queries without keys or of keys without queries, so that a padded query
gives 0 and a padded key is never read.

The layout is an int32 tensor ``[1, 1, 2, n + 1]``: the running totals of the sequences' lengths, of queries and of
keys. It has four dimensions because transformers passes such a mask on as it is. Its size depends on shapes only
(but for packed sequences, which torch.compile must be told of otherwise), so that it can be traced and captured.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ADVICE = (
    "use attn_implementation='foundry', or patch(..., dense_masks='kernels'), to have the kernels read such masks, or "
    "'foundry_or_sdpa' and dense_masks='sdpa' to have such calls run on SDPA, or on the model's own eager attention "
    "where there is a soft cap or sinks (by name that is 'foundry_or_eager')"
)


class DenseMask(ValueError):
    """A mask that kernels cannot skip by; of the reason why and, where the mask is causal or a window but for padding
    between tokens, of what `present_keys` gives."""

    def __str__(self) -> str:  # and no __init__, which torch.compile could not trace
        return f"attention_mask {self.args[0]}; {ADVICE}"

    @property
    def present(self) -> Tensor | None:
        return self.args[1] if len(self.args) > 1 else None


def present_keys(padding: Tensor, begin: int, keys: int) -> Tensor:
    """Returns ``[B, 1, 1, S]`` int8, 1 for a token and 0 for padding, of ``[B, ..]`` bool from key `begin` on.

    It goes with what the kernels know, causal or a window, unlike a mask of any other dtype, which says it all.
    """
    present = padding[:, begin : begin + keys]
    present = torch.nn.functional.pad(present, (0, keys - present.shape[1]))
    return present.to(torch.int8)[:, None, None]


def padding_layout(
    padding: Tensor | None, batch: int, queries: int, keys: int, first: int | Tensor, device: Any, traced: bool
) -> Tensor | None:
    """Returns the layout of a batch with padding, or of keys that are not there yet; None where there is neither.

    Args:
        padding: ``[B, S]`` bool, True for a token, or None.
        first: the key that the first query is aligned with. Keys after the last query's are not valid yet (a static
            cache).
        traced: whether values cannot be read. A padding mask with holes then fails when the graph runs.

    Raises:
        DenseMask: a row has padding between its tokens.
    """
    exact = not isinstance(first, Tensor) and first + queries == keys
    if padding is None:
        if exact:
            return None
        padding = torch.ones(batch, keys, dtype=torch.bool, device=device)
    present = padding & (torch.arange(keys, device=device) < first + queries)
    count = present.sum(1)
    start = present.int().argmax(1)
    last = keys - 1 - present.flip(1).int().argmax(1)
    whole = ((last - start + 1 == count) | (count == 0)).all()
    if traced:
        torch._assert_async(whole, "attention_mask has padding between the tokens of a row")
    else:
        full, unbroken = torch.stack([(count == keys).all(), whole]).tolist()
        if exact and full:
            return None
        if not unbroken:
            keys_alone = present_keys(padding, 0, keys) if exact else None
            raise DenseMask("has padding between the tokens of a row", keys_alone)
    end = start + count
    from_, to = ((x - first).clamp(0, queries) for x in (start, end))
    zero = torch.zeros_like(start)
    of_queries = torch.stack([from_, zero, to - from_, queries - to, zero], 1)
    of_keys = torch.stack([zero, start, count, zero, keys - end], 1)
    totals = torch.stack([of_queries.flatten(), of_keys.flatten()]).cumsum(1)
    return torch.nn.functional.pad(totals, (1, 0)).to(torch.int32)[None, None]


def dense_layout(
    layout: tuple[Tensor, Tensor], batch: int, queries: int, keys: int, left: int | None = None, right: int | None = 0
) -> Tensor:
    """Returns a layout as a mask ``[B, 1, T, S]``, True where a query sees a key: one of its own sequence, at most
    `left` before it and `right` after it, the last query of a sequence being aligned with the last key. None is
    unbounded."""

    def place(totals: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Returns the sequence of each token ``[B, tokens]``, and how far it is from the sequence's end."""
        token = torch.arange(batch * tokens, device=totals.device, dtype=totals.dtype)
        sequence = torch.searchsorted(totals, token, right=True) - 1
        return sequence.view(batch, tokens), (totals[sequence + 1] - token).view(batch, tokens)

    (of_query, query_left), (of_key, key_left) = (
        place(layout[0].contiguous(), queries),
        place(layout[1].contiguous(), keys),
    )
    seen = of_query[:, :, None] == of_key[:, None]
    before = key_left[:, None] - query_left[:, :, None]
    if left is not None:
        seen = seen & (before <= left)
    if right is not None:
        seen = seen & (before >= -right)
    return seen[:, None]


def packed_layout(follows: Tensor) -> Tensor | None:
    """Returns the layout of sequences packed in a row: `follows` ``[B, T - 1]`` says whether token t + 1 continues
    token t's.

    None where every row is one sequence. Reads values.
    """
    if follows.all():
        return None
    begins = torch.nn.functional.pad(~follows, (1, 0), value=True).flatten()
    totals = torch.cat([begins.nonzero().squeeze(1), begins.new_tensor([begins.numel()], dtype=torch.long)])
    return totals.to(torch.int32).expand(2, -1)[None, None]


def neighbours(
    function: MaskFunction, batch: int, queries: int, first: int | Tensor, device: Any
) -> tuple[Tensor, Tensor]:
    """What a mask function says of each query and the key before it, and of each query and the key after it.

    Two ``[B, T - 1]``: enough to tell packed sequences, and masks that let a token see later ones, from a causal mask.
    """
    rows = torch.arange(batch, device=device)[:, None, None, None]
    head = torch.zeros(1, dtype=torch.long, device=device)[None, :, None, None]
    later = (torch.arange(1, queries, device=device) + first)[None, None, :, None]
    shape = (batch, queries - 1)
    before = function(rows, head, later, later - 1).expand(batch, 1, queries - 1, 1).reshape(shape)
    after = function(rows, head, later - 1, later).expand(batch, 1, queries - 1, 1).reshape(shape)
    return before, after


def blocks_in_window(function: MaskFunction) -> tuple[Tensor, int] | None:
    """(the block of each token ``[B, S]``, -1 for none; the window) of a mask that is causal but for blocks of tokens
    that see each other, within a sliding window: what Gemma 3 makes of images. None for any other mask.

    Packed sequences around it are looked through; :func:`neighbours` finds those.
    """
    outer = _parts(function, "and_masks").get("mask_functions", ())
    if len(outer) != 2:
        return None
    if _parts(outer[0], "packed_sequence_mask_function"):
        inner = _parts(outer[1], "remap_positions_for_packed_sequence").get("mask_function")
        return None if inner is None else blocks_in_window(inner)
    either = _parts(outer[0], "or_masks").get("mask_functions", ())
    window = _parts(outer[1], "sliding_window_overlay").get("sliding_window")
    if window is None or len(either) != 2 or getattr(either[0], "__name__", "") != "causal_mask_function":
        return None
    blocks = _parts(either[1], "blockwise_overlay").get("block_sequence_ids")
    return None if blocks is None else (blocks, window)


def _parts(function: Any, maker: str) -> dict[str, Any]:
    """What `function` was made of by the function `maker` of transformers; empty if another one made it."""
    if getattr(function, "__module__", "") != "transformers.masking_utils":
        return {}
    if not function.__qualname__.startswith(f"{maker}.<locals>."):
        return {}
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells, strict=True)}
