"""Converts masks of transformers to forms with which kernels can skip keys.

transformers describes a mask by a function of (batch, head, query, key) and a padding mask. The kernels support causal
masks, windows, and packed sequences. So a batch with padding becomes packed sequences, without moving data: each row is
cut into the tokens before, inside and after its real tokens. The padding is also sequences, of queries without keys or
of keys without queries, so that padded queries give 0 and padded keys are never read.

The layout is an int32 tensor ``[1, 1, 2, n + 1]``: the running totals of the sequences' lengths, of queries and of
keys. It has four dimensions because transformers passes such a mask on as it is. Its size depends only on shapes
(except for packed sequences, which torch.compile must be told of in another way), so that it can be traced and
captured.

The meaning of such a tensor is stored in an attribute of it (`marked`), which a caller's mask never has.
"""

from __future__ import annotations

import weakref
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


#: The kinds of masks that this module makes. LAYOUT: running totals of causal sequences. KEYS: ``[B, 1, 1, S]`` bool,
#: True for keys that are not padding, in addition to a causal mask or a window. UNREAD: ``[1, 1, 1, 1]``, the number of
#: places where packed sequences begin, which must be 0. DENSE: ``[B, 1, T, S]`` bool, True where a query sees a key.
LAYOUT, KEYS, UNREAD, DENSE = "layout", "keys", "unread", "dense"


def marked(mask: Tensor, kind: str, apart: bool = False) -> Tensor:
    """Returns `mask`, marked with its kind. apart: whether it separates the documents of the running call.

    The marks are kept if the mask is moved to another device, as accelerate does between layers.
    """
    mask._foundry_kind = kind  # type: ignore[attr-defined]
    mask._foundry_apart = apart  # type: ignore[attr-defined]
    if not torch.compiler.is_compiling():
        itself = weakref.ref(mask)

        def to(*args: Any, **kwargs: Any) -> Tensor:
            mask = itself()
            assert mask is not None
            moved = Tensor.to(mask, *args, **kwargs)
            return moved if moved is mask else marked(moved, kind, apart)

        mask.to = to  # type: ignore[method-assign]
    return mask


def kind_of(mask: Tensor | None) -> str | None:
    """Returns the kind of a mask of this module; None for any other mask."""
    return None if mask is None else getattr(mask, "_foundry_kind", None)


def keeps_apart(mask: Tensor | None) -> bool:
    return mask is not None and bool(getattr(mask, "_foundry_apart", False))


def is_dense(mask: Tensor | None) -> bool:
    """Returns whether a mask, also a caller's, has a value for each query and key."""
    return mask is not None and kind_of(mask) not in (LAYOUT, UNREAD)


class DenseMask(ValueError):
    """A mask with which kernels cannot skip anything. Its arguments are the reason and, if the mask is causal or a
    window except for padding between tokens, the result of `present_keys`."""

    def __str__(self) -> str:  # without __init__, which torch.compile could not trace
        return f"attention_mask {self.args[0]}; {ADVICE}"

    @property
    def present(self) -> Tensor | None:
        return self.args[1] if len(self.args) > 1 else None


def present_keys(padding: Tensor, begin: int, keys: int) -> Tensor:
    """Returns ``[B, 1, 1, S]`` bool, True for a token and False for padding, from ``[B, ..]`` bool from key `begin` on.

    It is combined with causal masks and windows, unlike other masks with four dimensions, which are complete.
    """
    present = padding[:, begin : begin + keys]
    present = torch.nn.functional.pad(present, (0, keys - present.shape[1]))
    return marked(present[:, None, None], KEYS)


def padding_layout(
    padding: Tensor | None, batch: int, queries: int, keys: int, first: int | Tensor, device: Any, traced: bool
) -> Tensor | None:
    """Returns the layout of a batch with padding or with keys that do not exist yet; None without either.

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
    return as_mask(torch.nn.functional.pad(totals, (1, 0)).to(torch.int32))


def as_mask(totals: Tensor, apart: bool = False) -> Tensor:
    """Returns running totals ``[2, n + 1]`` as a mask."""
    return marked(totals[None, None], LAYOUT, apart)


def totals_of(layout: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the running totals of queries and of keys of a layout."""
    totals = layout[0, 0, 0] if layout.dim() == 5 else layout[0, 0]
    return totals[0], totals[1]


def dense_layout(
    layout: tuple[Tensor, Tensor], batch: int, queries: int, keys: int, left: int | None = None, right: int | None = 0
) -> Tensor:
    """Returns a layout as a mask ``[B, 1, T, S]``, True where a query sees a key: one of its own sequence, at most
    `left` before it and `right` after it, the last query of a sequence being aligned with the last key. None is
    unbounded."""

    def place(totals: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Returns the sequence of each token ``[B, tokens]``, and the token's distance from the sequence's end."""
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

    None if every row is one sequence. Reads values.
    """
    if follows.all():
        return None
    begins = torch.nn.functional.pad(~follows, (1, 0), value=True).flatten()
    totals = torch.cat([begins.nonzero().squeeze(1), begins.new_tensor([begins.numel()], dtype=torch.long)])
    return as_mask(totals.to(torch.int32).expand(2, -1))


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
