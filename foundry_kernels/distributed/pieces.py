"""The rectangles of the score matrix that a process computes with the keys and values of another process.

They follow from sizes, before anything is computed. A pair of two different chunks of the sequence is one rectangle,
because at most one document spans both; a chunk with itself is a square of one document or several. Each rectangle is
cut to the part that a window leaves, so that its own window has no negative numbers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from foundry_kernels.distributed.zigzag import Place


class Piece(NamedTuple):
    """Queries and keys of local parts, and which of them see each other, as options of a kernel."""

    queries: tuple[int, int]  # first and behind the last, in the process's part of T / n
    keys: tuple[int, int]
    left: int | None = None  # the window, query 0 beside key 0
    right: int | None = None
    cu_seqlens: tuple[int, ...] | None = None  # of the documents in a square, None for one
    distance: int = 0  # the first query's place in the sequence minus the first key's


@lru_cache(maxsize=64)
def plan(
    place: Place,
    chunk: int,
    left: int | None,
    right: int | None,
    documents: tuple[int, ...] | None,
    relative: bool,
) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of a process, for the keys of process 0, 1, ..

    Args:
        chunk: tokens of a chunk.
        left, right: the window of the whole sequence, None where it is unbounded.
        documents: where each begins, and the length of the sequence; None for one.
        relative: whether scores depend on the distance of query and key.
    """
    if documents is not None:
        documents = tuple(dict.fromkeys(documents))  # without those of no token
        documents = None if len(documents) == 2 else documents
    found = []
    for source in range(place.size):
        whole = (
            None if relative or documents is not None or left is not None else _whole(place.rank, source, chunk, right)
        )
        found.append(tuple(_pieces(place, source, chunk, left, right, documents)) if whole is None else (whole,))
    return tuple(found)


def _whole(rank: int, source: int, chunk: int, right: int | None) -> Piece | None:
    """All pairs of two parts as one piece, where there are no windows, documents or distances."""
    first, second, both = (0, chunk), (chunk, 2 * chunk), (0, 2 * chunk)
    if right is None:
        return Piece(both, both)
    if right > 0:
        return None
    if source == rank:  # the first chunk is before the second here too
        return Piece(both, both, right=0)
    return Piece(both, first) if source < rank else Piece(second, both)


def _pieces(
    place: Place, source: int, chunk: int, left: int | None, right: int | None, documents: tuple[int, ...] | None
) -> Iterator[Piece]:
    for i, of_q in enumerate(place.chunks):
        for j, of_k in enumerate(Place(source, place.size).chunks):
            if of_q == of_k:
                yield _square(i * chunk, of_q * chunk, chunk, left, right, documents)
            elif (found := _rectangle(of_q * chunk, of_k * chunk, chunk, left, right, documents)) is not None:
                local_q, local_k = (i - of_q) * chunk, (j - of_k) * chunk
                (q0, q1), (k0, k1) = found.queries, found.keys
                yield found._replace(queries=(q0 + local_q, q1 + local_q), keys=(k0 + local_k, k1 + local_k))


def _square(
    local: int, start: int, chunk: int, left: int | None, right: int | None, documents: tuple[int, ...] | None
) -> Piece:
    """A chunk with itself."""
    place = (local, local + chunk)
    inside = [] if documents is None else [d - start for d in documents if start < d < start + chunk]
    return Piece(place, place, left, right, (0, *inside, chunk) if inside else None)


def _rectangle(
    q0: int, k0: int, chunk: int, left: int | None, right: int | None, documents: tuple[int, ...] | None
) -> Piece | None:
    """Two different chunks, by places in the sequence; None where no query sees a key."""
    q1, k1 = q0 + chunk, k0 + chunk
    if documents is not None:  # the one that holds the later chunk's first token
        at = bisect_right(documents, max(q0, k0))
        begin, end = documents[at - 1], documents[at]
        q0, q1, k0, k1 = max(q0, begin), min(q1, end), max(k0, begin), min(k1, end)
    if left is not None:
        k0, q1 = max(k0, q0 - left), min(q1, k1 + left)
    if right is not None:
        q0, k1 = max(q0, k0 - right), min(k1, q1 + right)
    if q0 >= q1 or k0 >= k1:
        return None
    distance = q0 - k0
    left = None if left is None or q1 - 1 - left <= k0 else left - distance
    right = None if right is None or q0 + right >= k1 - 1 else right + distance
    return Piece((q0, q1), (k0, k1), left, right, None, distance)
