"""The bookkeeping of pages and sequences, without tensors.

Forked sequences share reference-counted pages, and a shared page is copied before one of them writes to it. Kwon et
al., "PagedAttention", 2023, arXiv:2309.06180.
"""

from __future__ import annotations

from collections.abc import Mapping


class OutOfPages(RuntimeError):
    """There are fewer free pages than a step needs, or no state is free for a new sequence; nothing has changed."""


class Pages:
    """The pages of a cache: `n_pages` of `page_size` positions each."""

    def __init__(self, n_pages: int, page_size: int) -> None:
        self.n_pages, self.page_size = n_pages, page_size
        self._free = list(range(n_pages - 1, -1, -1))
        self._references = [0] * n_pages
        self._tables: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @property
    def n_free(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The numbers of the sequences, in the order of their creation."""
        return tuple(self._tables)

    def length(self, sequence: int) -> int:
        return self._lengths[self._known(sequence)]

    def table(self, sequence: int) -> tuple[int, ...]:
        """The sequence's pages. There may be one more than its length needs, or several after a failed step."""
        return tuple(self._tables[self._known(sequence)])

    def references(self, page: int) -> int:
        """The number of sequences that have the page."""
        return self._references[page]

    def add(self) -> int:
        """Creates an empty sequence without pages and returns its number."""
        return self._new([], 0)

    def fork(self, sequence: int) -> int:
        """Creates a copy of the sequence that shares all its pages, and returns its number."""
        length = self.length(sequence)
        return self._new(self._tables[sequence][: self._count(length)], length)

    def free(self, sequence: int) -> None:
        """Removes the sequence and frees the pages that it does not share."""
        self._release(self._tables.pop(self._known(sequence)))
        del self._lengths[sequence]

    def truncate(self, sequence: int, length: int) -> None:
        """Removes the positions from `length` on.

        Raises:
            ValueError: the sequence is shorter.
        """
        if not 0 <= length <= self.length(sequence):
            raise ValueError(
                f"length must be in 0 .. {self.length(sequence)}, that of sequence {sequence}; got {length}"
            )
        table, kept = self._tables[sequence], self._count(length)
        self._release(table[kept:])
        del table[kept:]
        self._lengths[sequence] = length

    def reserve(self, counts: Mapping[int, int]) -> list[tuple[int, int]]:
        """Reserves unshared pages for more positions of each sequence. Lengths do not change.

        Returns:
            The copies to make: pairs of a page and the new page that replaces it in a sequence.

        Raises:
            OutOfPages: there are fewer free pages; nothing has changed.
        """
        copied: list[tuple[int, int]] = []  # sequence, column
        shared: dict[int, int] = {}  # references to release
        missing: dict[int, int] = {}
        for sequence, count in counts.items():
            length, table = self.length(sequence), self._tables[sequence]
            column = length // self.page_size
            if count and length % self.page_size:
                page = table[column]
                if self._references[page] - shared.get(page, 0) > 1:
                    shared[page] = shared.get(page, 0) + 1
                    copied.append((sequence, column))
            missing[sequence] = max(self._count(length + count) - len(table), 0)
        needed = len(copied) + sum(missing.values())
        if needed > self.n_free:
            raise OutOfPages(
                f"cache is full: the step needs {needed} pages of {self.page_size} positions more, and {self.n_free} "
                f"of {self.n_pages} are free"
            )
        pairs = []
        for sequence, column in copied:
            table = self._tables[sequence]
            pairs.append((table[column], self._take()))
            self._release(table[column : column + 1])
            table[column] = pairs[-1][1]
        for sequence, count in missing.items():
            self._tables[sequence] += [self._take() for _ in range(count)]
        return pairs

    def advance(self, counts: Mapping[int, int]) -> None:
        """Adds the reserved positions to the lengths."""
        for sequence, count in counts.items():
            self._lengths[sequence] += count

    def _count(self, length: int) -> int:
        return -(-length // self.page_size)

    def _known(self, sequence: int) -> int:
        if sequence not in self._tables:
            raise ValueError(f"sequence must be one of the cache's, {list(self._tables)}; got {sequence!r}")
        return sequence

    def _new(self, table: list[int], length: int) -> int:
        number, self._next = self._next, self._next + 1
        for page in table:
            self._references[page] += 1
        self._tables[number], self._lengths[number] = table, length
        return number

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
