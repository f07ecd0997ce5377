"""Which keys each query sees, in a form with which kernels can skip keys: `AttentionPlan`.

transformers describes a mask by a function of (batch, head, query, key) and a padding mask. The kernels support causal
masks, windows, and packed sequences. So a batch with padding becomes packed sequences, without moving data: each row is
cut into the tokens before, inside and after its real tokens. The padding is also sequences, of queries without keys or
of keys without queries, so that padded queries give 0 and padded keys are never read.

transformers passes tensors of four dimensions on as they are. So a plan travels as one, whose attribute it is.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from foundry_kernels.integrations.attention.documents import Documents, sequences_of
from foundry_kernels.integrations.attention.positions import UNREAD, can_be_read
from foundry_kernels.ops.flash_attention.attention_mask import TILE, AttentionMask

ADVICE = (
    "use attn_implementation='foundry', or patch(..., dense_masks='kernels'), to have the kernels read such masks, or "
    "'foundry_or_sdpa' and dense_masks='sdpa' to have such calls run on SDPA, or on the model's own eager attention "
    "where there is a soft cap or sinks (by name that is 'foundry_or_eager')"
)


class DenseMask(ValueError):
    """A mask with which kernels cannot skip anything. Its arguments are the reason and, if the mask is causal or a
    window except for padding between tokens, the plan of its keys."""

    def __str__(self) -> str:  # without __init__, which torch.compile could not trace
        return f"attention_mask {self.args[0]}; {ADVICE}"

    @property
    def present(self) -> AttentionPlan | None:
        return self.args[1] if len(self.args) > 1 else None


@dataclass(eq=False)
class AttentionPlan:
    """Which keys each query sees. At most one of the first four is given; without, a causal mask, a window or nothing
    hides keys.

    totals: ``[2, n + 1]`` int32, the running totals of the lengths of causal sequences, of queries and of keys. The
    size depends only on shapes (except for packed sequences, which torch.compile must be told of in another way), so
    that it can be traced and captured.
    keys: ``[B, 1, 1, S]`` bool, True for keys that are not padding, besides a causal mask or a window.
    begins: ``[1, 1]``, the number of places where packed sequences begin, which could not be read and must be 0.
    dense: what broadcasts to ``[B, H, T, S]``, bool, True where a query sees a key, or a caller's, perhaps floating.
    tiles: the empty and full tiles of `dense`, computed once for all layers.
    documents: those that it keeps apart.
    is_callers: whether `dense` is a caller's mask.
    """

    totals: Tensor | None = None
    keys: Tensor | None = None
    begins: Tensor | None = None
    dense: Tensor | None = None
    tiles: AttentionMask | None = None
    documents: Documents | None = None
    is_callers: bool = False

    # As an argument of layers ---------------------------------------------------------------------------------------

    @staticmethod
    def of(mask: Any) -> AttentionPlan:
        """Returns the plan that `mask` is, or that a caller's mask or None stands for.

        Raises:
            TypeError: a caller's is neither bool nor floating: SDPA takes no other.
        """
        if mask is None:
            return AttentionPlan()
        plan: AttentionPlan | None = getattr(mask, "_foundry_plan", None)
        if plan is not None:
            return plan
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            found = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"attention_mask of four dimensions must be bool or floating; got {found}")
        return AttentionPlan(dense=mask, is_callers=True)

    def mask(self, dims: int = 4) -> Tensor | None:
        """Returns the plan as a mask, which it stays on another device too, as accelerate moves masks between layers;
        None if it hides nothing. dims: 5 for a model that would add ALiBi to a mask of four."""
        found = next((x for x in (self.totals, self.keys, self.begins, self.dense) if x is not None), None)
        if found is None:
            return None
        mask = found.view((1,) * (dims - found.dim()) + found.shape)
        mask._foundry_plan = self  # type: ignore[attr-defined]
        if not torch.compiler.is_compiling():
            itself = weakref.ref(mask)

            def to(*args: Any, **kwargs: Any) -> Tensor | None:
                moved = found.to(*args, **kwargs)
                here = itself() if moved is found else None
                return self._as(moved).mask(dims) if here is None else here

            mask.to = to  # type: ignore[assignment, method-assign]
        return mask

    def _as(self, data: Tensor) -> AttentionPlan:
        name = next(n for n in ("totals", "keys", "begins", "dense") if getattr(self, n) is not None)
        changed: dict[str, Any] = {name: data, "tiles": None}
        return replace(self, **changed)

    # What it hides --------------------------------------------------------------------------------------------------

    @property
    def hides_nothing(self) -> bool:
        """Whether it is the one of no mask."""
        return self.totals is None and self.begins is None and not self.is_dense

    @property
    def is_dense(self) -> bool:
        """Whether it has a value for each query and key, or for each key."""
        return self.keys is not None or self.dense is not None

    def real(self, batch: int) -> Tensor | None:
        """Returns which tokens are no padding, ``[B, T]`` bool, of as many queries as keys; None where all are."""
        if self.keys is not None:
            return self.keys[:, 0, 0].expand(batch, -1)
        return None if self.dense is None else self.dense[:, 0].diagonal(dim1=-2, dim2=-1).expand(batch, -1)

    def check_begins(self) -> None:
        """Fails when the graph runs, if packed sequences begin that could not be read."""
        if self.begins is not None:
            torch._assert_async((self.begins == 0).all(), f"position_ids restart: {UNREAD}")

    def as_dense(self, batch: int, queries: int, keys: int, device: Any) -> Tensor:
        """Returns a causal plan as a mask ``[B or 1, 1, T, S]``, True where a query sees a key; one that sees none,
        which is padding, sees all, as in transformers' own masks. A dense one is returned as it is."""
        if (mask := self.dense if self.keys is None else self.keys) is not None:
            return mask
        self.check_begins()
        if self.totals is None:
            return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)[None, None]
        seen = seen_in(self.totals, batch, queries, keys)
        return seen | ~seen.any(-1, keepdim=True)

    def combined(self, bias: Tensor | None) -> Tensor | AttentionMask | None:
        """Returns the values that it has for queries or keys, and a bias, as one mask for the kernels."""
        mask = self.dense if self.keys is None else self.keys
        if bias is None:
            return mask if self.tiles is None or torch.compiler.is_dynamo_compiling() else self.tiles
        if mask is None:
            return bias
        if mask.dtype != torch.bool:
            return bias + mask
        if mask.stride(-2) == 0:  # the keys alone: no query differs
            mask = mask[..., :1, :]
        return torch.where(mask, bias, -torch.inf)

    # Other plans ----------------------------------------------------------------------------------------------------

    def separated(
        self, documents: Documents | None, keys: int, causal: bool = True, window: int | None = None
    ) -> AttentionPlan:
        """Returns a plan that keeps `documents` apart too. causal, window: what goes with a plan of keys."""
        if documents is None:
            return self
        told = torch.stack((documents.totals_q, documents.totals_k))
        if self.keys is not None:
            right = 0 if causal else window
            seen = seen_in(told, documents.batch, documents.queries, keys, window, right)
            return AttentionPlan(dense=seen & self.keys, documents=documents)
        if self.dense is not None:
            same = documents.same(keys)
            seen = self.dense & same if self.dense.dtype == torch.bool else self.dense.masked_fill(~same, -torch.inf)
            return AttentionPlan(dense=seen, documents=documents)
        if self.totals is None:
            return AttentionPlan(totals=told, documents=documents)
        if not can_be_read(self.totals):
            seen = seen_in(self.totals, documents.batch, documents.queries, keys, window)
            return AttentionPlan(dense=seen & documents.same(keys), documents=documents)
        # The intersections of documents and sequences, in the order of both.
        of_keys = documents.of_keys(keys)
        of_keys = torch.where(of_keys < 0, of_keys[:, documents.keys - 1 : documents.keys], of_keys)
        codes = [
            sequences_of(totals, documents.batch, tokens) * told.shape[1] + document
            for totals, tokens, document in zip(
                self.totals, (documents.queries, keys), (documents.of_queries(), of_keys), strict=True
            )
        ]
        each = torch.cat([code.flatten() for code in codes]).unique()
        ends = [pad(torch.searchsorted(code.flatten(), each), (0, 1), value=code.numel()) for code in codes]
        return AttentionPlan(totals=torch.stack(ends).to(torch.int32), documents=documents)

    def with_tiles(self) -> AttentionPlan:
        """Returns the plan with its empty and full tiles, if there are any. A mask that the model derives from it is
        without them, which is harmless."""
        seen = self.dense
        if seen is None or seen.dtype != torch.bool or not can_be_read(seen):
            return self
        if seen.shape[-1] < 2 * TILE or seen.shape[-2] < TILE:
            return self
        part = seen[: 1 if seen.stride(0) == 0 else None, :, : 1 if seen.stride(2) == 0 else None]
        return replace(self, tiles=AttentionMask(part))

    # Of padding and of packed sequences -----------------------------------------------------------------------------

    @staticmethod
    def of_present(padding: Tensor, begin: int, keys: int) -> AttentionPlan:
        """Returns the plan of the keys that are no padding, from ``[B, ..]`` bool from key `begin` on.

        It is combined with causal masks and windows, unlike other masks with four dimensions, which are complete.
        """
        present = padding[:, begin : begin + keys]
        return AttentionPlan(keys=pad(present, (0, keys - present.shape[1]))[:, None, None])

    @staticmethod
    def of_padding(
        padding: Tensor | None, batch: int, queries: int, keys: int, first: int | Tensor, device: Any, traced: bool
    ) -> AttentionPlan:
        """Returns the plan of a batch with padding or with keys that do not exist yet.

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
                return AttentionPlan()
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
                return AttentionPlan()
            if not unbroken:
                keys_alone = AttentionPlan.of_present(padding, 0, keys) if exact else None
                raise DenseMask("has padding between the tokens of a row", keys_alone)
        end = start + count
        from_, to = ((x - first).clamp(0, queries) for x in (start, end))
        zero = torch.zeros_like(start)
        of_queries = torch.stack([from_, zero, to - from_, queries - to, zero], 1)
        of_keys = torch.stack([zero, start, count, zero, keys - end], 1)
        totals = torch.stack([of_queries.flatten(), of_keys.flatten()]).cumsum(1)
        return AttentionPlan(totals=pad(totals, (1, 0)).to(torch.int32))

    @staticmethod
    def of_packed(follows: Tensor) -> AttentionPlan:
        """Returns the plan of sequences packed in a row: `follows` ``[B, T - 1]`` says whether token t + 1 continues
        token t's. Reads values."""
        found = Documents.of_begins(~follows, "position_ids")
        return AttentionPlan() if found is None else AttentionPlan(totals=found.totals_q.expand(2, -1))


def seen_in(
    totals: Tensor, batch: int, queries: int, keys: int, left: int | None = None, right: int | None = 0
) -> Tensor:
    """Returns ``[B, 1, T, S]``, True where a query sees a key: one of its own sequence, at most `left` before it and
    `right` after it, the last query of a sequence being aligned with the last key. None is unbounded. totals: as of a
    plan."""

    def place(totals: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Returns the sequence of each token ``[B, tokens]``, and the token's distance from the sequence's end."""
        sequence = sequences_of(totals, batch, tokens)
        token = torch.arange(batch * tokens, device=totals.device, dtype=totals.dtype)
        return sequence, totals[sequence + 1] - token.view(batch, tokens)

    (of_query, query_left), (of_key, key_left) = place(totals[0], queries), place(totals[1], keys)
    seen = of_query[:, :, None] == of_key[:, None]
    before = key_left[:, None] - query_left[:, :, None]
    if left is not None:
        seen = seen & (before <= left)
    if right is not None:
        seen = seen & (before >= -right)
    return seen[:, None]
