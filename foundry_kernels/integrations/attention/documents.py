"""Packed documents: several in a row, by their lengths, by the places where they begin, or as arguments tell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.functional import pad
from torch.utils.weak import WeakTensorKeyDictionary

from foundry_kernels.integrations.attention.positions import begins_of_ids, can_be_read, described

LENGTHS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: Names that other packages have for them. transformers takes them as well, and ignores them.
OTHER_NAMES = frozenset(f"{name}{end}" for name in ("cu_seqlens", "max_seqlen") for end in ("", "_q", "_k", "_kv"))
#: The advice in errors.
ONE_A_ROW = "pass one document a row, or cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"
#: What layers have read from the values of a tensor, for `once`.
_READ: Any = WeakTensorKeyDictionary()


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

    @classmethod
    def of_begins(cls, begins: Tensor, given_by: str) -> Documents | None:
        """Returns the documents from `begins` ``[B, T - 1]`` bool: whether token t + 1 begins one. None if each row is
        one document. Reads values."""
        if not begins.any():
            return None
        batch, tokens = begins.shape[0], begins.shape[1] + 1
        starts = pad(begins, (1, 0), value=True).flatten().nonzero().flatten()
        totals = pad(starts, (0, 1), value=batch * tokens).to(torch.int32)
        return cls(totals, totals, batch, tokens, tokens, given_by)

    def to(self, device: torch.device) -> Documents:
        totals = self.totals_q.to(device), self.totals_k.to(device)
        return Documents(*totals, self.batch, self.queries, self.keys, self.given_by)

    def fits(self, batch: int, queries: int) -> bool:
        return self.batch == batch and self.queries == queries

    def of_queries(self) -> Tensor:
        """Returns the document of each query, ``[B, T]``."""
        return sequences_of(self.totals_q, self.batch, self.queries)

    def of_keys(self, keys: int) -> Tensor:
        """Returns the document of each of `keys` keys, ``[B, S]``; -1 for keys that do not exist yet."""
        found = sequences_of(self.totals_k, self.batch, self.keys)
        return pad(found, (0, keys - self.keys), value=-1)

    def same(self, keys: int) -> Tensor:
        """Returns ``[B, 1, T, S]`` bool, True where a query and a key have the same document."""
        return (self.of_queries()[:, :, None] == self.of_keys(keys)[:, None])[:, None]

    def check_finer(self, begins: Tensor, name: str) -> None:
        """Raises ValueError if `begins` ``[1 or B, T - 1]`` of the argument `name` has a start that is none here."""
        place = self.of_queries()
        if bool((begins & (place[:, 1:] == place[:, :-1])).any()):
            raise ValueError(f"{name} begins a document where {self.given_by} begins none: they contradict each other")


def sequences_of(totals: Tensor, batch: int, tokens: int) -> Tensor:
    """Returns the sequence of each token, ``[B, tokens]``, by running totals of the sequences' lengths."""
    token = torch.arange(batch * tokens, device=totals.device, dtype=totals.dtype)
    return (torch.searchsorted(totals.contiguous(), token, right=True) - 1).view(batch, tokens)


def once(owner: Any, sizes: tuple[int, ...], read: Callable[[], Documents | None]) -> Documents | None:
    """Returns what `read` does, which is kept while `owner` lives: all layers of a model get this one tensor, and the
    host waits for its values once."""
    if not isinstance(owner, Tensor) or is_compiling() or owner.is_inference():
        return read()
    key = (sizes, owner._version)
    known = _READ.get(owner)
    if known is None or known[0] != key:
        _READ[owner] = known = key, read()
    found: Documents | None = known[1]
    return found


# Lengths ------------------------------------------------------------------------------------------------------------


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
    totals = [x.detach().to(torch.int32) for x in totals]  # other objects: `once` must not keep its owner alive
    documents = Documents(totals[0], totals[1], batch, queries, keys, "cu_seq_lens_q")
    if (seq_idx := given.get("seq_idx")) is not None and can_be_read(totals[0]):
        documents.check_finer(begins_of_ids(seq_idx, batch, queries), "seq_idx")
    return documents


def _check_totals(name: str, value: Any, batch: int, tokens: int) -> int:
    """Returns the length of the longest document; 0 if values cannot be read."""
    if not isinstance(value, Tensor) or value.dim() != 1 or value.is_floating_point() or value.dtype == torch.bool:
        raise ValueError(f"{name} must be a tensor [documents + 1] of integers; got {described(value)}")
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
        raise ValueError(f"{name} must be an int of 1 or more; got {described(value)}")
    number: int = value
    return number


def _from_indices(seq_idx: Any, batch: int, queries: int, keys: int) -> Documents | None:
    if seq_idx is None:
        return None
    if isinstance(seq_idx, Tensor) and not can_be_read(seq_idx):
        raise ValueError(f"seq_idx cannot be read under torch.compile; {ONE_A_ROW}")
    documents = Documents.of_begins(begins_of_ids(seq_idx, batch, queries), "seq_idx")
    if documents is not None and keys != queries:
        raise ValueError(f"seq_idx begins a document on a cache that is not empty; {ONE_A_ROW}")
    return documents
