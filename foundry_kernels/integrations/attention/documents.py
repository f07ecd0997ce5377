"""Packed documents: reads them from arguments, and separates them in masks.

Several documents may share a row. Their starts come from, in this order: data collators' lengths for flash attention
(`cu_seq_lens_q`, ...) or `seq_idx`; position ids that restart; an attention mask of segment ids.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: Names that other packages have for them. transformers takes them as well, and ignores them.
OTHER_NAMES = frozenset(f"{name}{end}" for name in ("cu_seqlens", "max_seqlen") for end in ("", "_q", "_k", "_kv"))
#: The advice in errors.
ONE_A_ROW = "pass one document a row, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"


@dataclass(frozen=True)
class Documents:
    """The documents of a batch, row after row.

    totals_q, totals_k: ``[n + 1]`` int32, the running totals of their lengths in queries and in keys. batch, queries,
    keys: the covered sizes. given_by: the argument that describes them.
    """

    totals_q: Tensor
    totals_k: Tensor
    batch: int
    queries: int
    keys: int
    given_by: str

    def to(self, device: torch.device) -> Documents:
        totals = self.totals_q.to(device), self.totals_k.to(device)
        return Documents(*totals, self.batch, self.queries, self.keys, self.given_by)

    def fits(self, batch: int, queries: int) -> bool:
        return self.batch == batch and self.queries == queries

    def of_queries(self) -> Tensor:
        """Returns the document of each query, ``[B, T]``."""
        return _places(self.totals_q, self.batch, self.queries)

    def of_keys(self, keys: int) -> Tensor:
        """Returns the document of each of `keys` keys, ``[B, S]``; -1 for keys that do not exist yet."""
        found = _places(self.totals_k, self.batch, self.keys)
        return torch.nn.functional.pad(found, (0, keys - self.keys), value=-1)

    def same(self, keys: int) -> Tensor:
        """Returns ``[B, 1, T, S]`` bool, True where a query and a key have the same document."""
        return (self.of_queries()[:, :, None] == self.of_keys(keys)[:, None])[:, None]


def _places(totals: Tensor, batch: int, tokens: int) -> Tensor:
    token = torch.arange(batch * tokens, device=totals.device, dtype=totals.dtype)
    return (torch.searchsorted(totals.contiguous(), token, right=True) - 1).view(batch, tokens)


# What arguments say -------------------------------------------------------------------------------------------------


def can_be_read(x: Tensor) -> bool:
    """Returns whether Python may look at the values of `x`: nothing traces or captures what is computed."""
    if is_compiling() or isinstance(x, torch._subclasses.FakeTensor) or x.device.type == "meta":
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def refuse_other_names(given: Mapping[str, Any], known: Collection[str] = ()) -> None:
    """Raises ValueError if lengths are given by the names of another package. known: the names that a model has."""
    for name, value in given.items():
        if value is not None and name in OTHER_NAMES and name not in known:
            raise ValueError(f"{name} must be None: documents are given by {', '.join(LENGTHS)}")


def from_lengths(given: Mapping[str, Any], batch: int, queries: int, keys: int) -> Documents | None:
    """Returns the documents of `cu_seq_lens_q` and the like, or else of `seq_idx`; None where neither is given.

    Raises:
        ValueError: an argument is missing, of the wrong kind, or does not fit the batch.
    """
    found = [name for name in LENGTHS if given.get(name) is not None]
    if not found:
        return _from_indices(given.get("seq_idx"), batch, queries, keys)
    for name in LENGTHS[:2]:
        if name not in found:
            raise ValueError(f"{name} must be given with {', '.join(found)}")
    totals = [given[name] for name in LENGTHS[:2]]
    for name, most, value, tokens in zip(LENGTHS[:2], LENGTHS[2:], totals, (queries, keys), strict=True):
        length = _check_totals(name, value, batch, tokens)
        if (bound := longest(given, most, batch * tokens)) < length:
            raise ValueError(f"{most} must be at least {length}, the longest document; got {bound}")
    if totals[0].shape != totals[1].shape:
        raise ValueError(
            f"cu_seq_lens_k must have as many elements as cu_seq_lens_q; got {len(totals[1])} and {len(totals[0])}"
        )
    totals = [x.to(torch.int32) for x in totals]
    documents = Documents(totals[0], totals[1], batch, queries, keys, "cu_seq_lens_q")
    if (seq_idx := given.get("seq_idx")) is not None and can_be_read(totals[0]):
        check_finer(documents, _begins_of(seq_idx, batch, queries), "seq_idx")
    return documents


def _check_totals(name: str, value: Any, batch: int, tokens: int) -> int:
    """Returns the length of the longest document; 0 if values cannot be read."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.is_floating_point() or value.dtype == torch.bool:
        raise ValueError(f"{name} must be a tensor [documents + 1] of integers; got {_described(value)}")
    if not can_be_read(value):
        return 0
    totals = value.tolist()
    if len(totals) < 2 or totals[0] != 0 or totals[-1] != batch * tokens or sorted(totals) != totals:
        raise ValueError(f"{name} must rise from 0 to the {batch * tokens} tokens of the batch; got {totals[:20]}")
    if not set(range(0, batch * tokens, tokens or 1)) <= set(totals):
        raise ValueError(f"{name} must begin a document with each row of {tokens} tokens; got {totals[:20]}")
    return max(end - start for start, end in itertools.pairwise(totals))


def longest(given: Mapping[str, Any], name: str, otherwise: int) -> int:
    """Returns `max_length_q` or `max_length_k`, an int or a tensor with one element; `otherwise` if it is not given.

    Raises:
        ValueError: it is neither, or less than 1.
    """
    value = given.get(name)
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_floating_point():
        value = int(value) if can_be_read(value) else None
    if value is None:
        return otherwise
    if isinstance(value, (bool, float, str, Tensor)) or value < 1:
        raise ValueError(f"{name} must be an int of 1 or more; got {_described(value)}")
    number: int = value
    return number


def _from_indices(seq_idx: Any, batch: int, queries: int, keys: int) -> Documents | None:
    if seq_idx is None:
        return None
    if isinstance(seq_idx, Tensor) and not can_be_read(seq_idx):
        raise ValueError(f"seq_idx cannot be read under torch.compile; {ONE_A_ROW}")
    documents = from_begins(_begins_of(seq_idx, batch, queries), "seq_idx")
    if documents is not None and keys != queries:
        raise ValueError(f"seq_idx begins a document on a cache that is not empty; {ONE_A_ROW}")
    return documents


def _begins_of(seq_idx: Any, batch: int, queries: int) -> Tensor:
    if not isinstance(seq_idx, Tensor) or seq_idx.shape != (batch, queries) or seq_idx.is_floating_point():
        raise ValueError(f"seq_idx must be a tensor {[batch, queries]} of integers; got {_described(seq_idx)}")
    begins = seq_idx.diff(dim=1) != 0
    _check_runs("seq_idx", seq_idx, begins)
    return begins


def _check_runs(name: str, ids: Tensor, begins: Tensor, padding: int | None = None) -> None:
    """Raises ValueError if a document of `ids` ``[B, T]`` is in two pieces. begins: ``[B, T - 1]``, whether token t + 1
    begins a document. padding: the id of tokens without a document."""
    for row, begin in zip(ids, begins, strict=True):
        documents = row if padding is None else row[row != padding]
        if max(len(documents.unique()), 1) != int(begin.sum()) + 1:
            raise ValueError(f"{name} must have the tokens of a document side by side; got {row.tolist()[:20]}")


def _described(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def from_begins(begins: Tensor, given_by: str) -> Documents | None:
    """Returns the documents from `begins` ``[B, T - 1]`` bool: whether token t + 1 begins one. None if each row is one
    document. Reads values."""
    if not begins.any():
        return None
    batch, tokens = begins.shape[0], begins.shape[1] + 1
    starts = torch.nn.functional.pad(begins, (1, 0), value=True).flatten().nonzero().flatten()
    totals = torch.nn.functional.pad(starts, (0, 1), value=batch * tokens).to(torch.int32)
    return Documents(totals, totals, batch, tokens, tokens, given_by)


def text_positions(position_ids: Any, queries: int) -> Tensor | None:
    """Returns positions ``[1 or B, T]`` that restart with each document, or None.

    Models of images have several axes. Of four or more the first counts tokens. Of three none does: they are of time,
    height and width, and repeat within an image.
    """
    if not isinstance(position_ids, Tensor) or position_ids.is_floating_point() or queries != position_ids.shape[-1]:
        return None
    if position_ids.dim() == 3 and position_ids.shape[0] >= 3:
        return position_ids[0] if position_ids.shape[0] > 3 else _since_zero(position_ids)
    return position_ids if position_ids.dim() == 2 else None


def _since_zero(axes: Tensor) -> Tensor:
    """Returns the number of tokens since the last one at 0, ``[B, T]``, of positions ``[3, B, T]``.

    A document begins with its only token at 0 on all axes: what follows an image is beyond all its positions. Just
    HunYuan-VL has images that begin at 0, and then go along the first axis, which is no axis of time there.
    """
    begins = (axes == 0).all(0)
    along = (axes[0, :, 1:] == 1) & (axes[1:, :, 1:] == 0).all(0)
    begins = begins & ~torch.nn.functional.pad(along, (0, 1))
    at = torch.arange(axes.shape[-1], device=axes.device)
    return at - torch.where(begins, at, 0).cummax(1).values


def restarts(positions: Tensor, real: Tensor | None = None) -> Tensor:
    """Returns ``[B, T - 1]`` bool: the position of token t + 1 does not follow the previous token's, and neither is
    padding.

    real: ``[B, T]`` bool, False for padding, whose positions have no meaning.
    """
    if real is None:
        return positions[:, 1:] <= positions[:, :-1]
    positions = positions.expand(real.shape[0], -1)
    before = _token_before(real)
    return (positions[:, 1:] <= positions.gather(1, before.clamp_min(0))) & real[:, 1:] & (before >= 0)


def _token_before(real: Tensor) -> Tensor:
    """Returns, for each token except the first, the last earlier token that is not padding, ``[B, T - 1]``; -1 for
    none."""
    at = torch.arange(real.shape[1], device=real.device)
    return torch.where(real, at, -1).cummax(1).values[:, :-1]


def segments(mask: Tensor) -> Tensor:
    """Returns ``[B, T - 1]`` bool of a mask of segment ids ``[B, T]``, 0 for padding: whether token t + 1 begins one.

    Raises:
        ValueError: the tokens of a segment are not side by side.
    """
    real = mask != 0
    before = _token_before(real)
    begins = (mask[:, 1:] != mask.gather(1, before.clamp_min(0))) & real[:, 1:] & (before >= 0)
    _check_runs("attention_mask", mask, begins, padding=0)
    return begins


def check_finer(documents: Documents, begins: Tensor, name: str) -> None:
    """Raises ValueError if `begins` ``[1 or B, T - 1]`` of the argument `name` has a start that `documents` does not
    have."""
    place = documents.of_queries()
    if bool((begins & (place[:, 1:] == place[:, :-1])).any()):
        raise ValueError(f"{name} begins a document where {documents.given_by} begins none: they contradict each other")


# Documents and masks ------------------------------------------------------------------------------------------------


def cut(layout: tuple[Tensor, Tensor] | None, documents: Documents, keys: int) -> tuple[Tensor, Tensor]:
    """Returns the running totals, of queries and of keys, for the intersections of documents and `layout`'s sequences.
    Reads values."""
    if layout is None:
        return documents.totals_q, documents.totals_k
    of_keys = documents.of_keys(keys)
    of_keys = torch.where(of_keys < 0, of_keys[:, documents.keys - 1 : documents.keys], of_keys)
    count = len(documents.totals_q)
    codes = [
        _places(totals, documents.batch, tokens).flatten() * count + document.flatten()
        for totals, tokens, document in zip(
            layout, (documents.queries, keys), (documents.of_queries(), of_keys), strict=True
        )
    ]
    sequences = torch.cat(codes).unique()
    totals_q, totals_k = (
        torch.cat([torch.searchsorted(code, sequences), code.new_tensor([len(code)])]).to(torch.int32) for code in codes
    )
    return totals_q, totals_k


def within(
    function: Callable[..., Tensor], documents: Documents, first: int | Tensor, begin: int, keys: int, anew: bool
) -> Callable[..., Tensor]:
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
