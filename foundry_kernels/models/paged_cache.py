"""A paged key-value cache: sequences of any lengths take pages as they grow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_int
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.pages import Pages
from foundry_kernels.models.state_slots import PagedState, StateSlots
from foundry_kernels.nn._paged import PagedKeyValues, PagedStep


class PagedKVCache:
    """Preallocated pages of keys and values for every layer. Sequences of any lengths take pages as they grow.

    Memory: ``n_layers * n_pages * page_size * n_kv_heads * (D + Dv)`` elements, whatever the number of sequences.

    A layer with linear attention has no pages but `n_sequences` states, one for each sequence. A forward pass
    overwrites them, and :meth:`fork` copies a state. A state does not go back, so such a sequence can only be truncated
    to 0 positions; after a pass that failed it must be, and read again.

    A sequence has a number. :meth:`add` creates a sequence, :meth:`fork` creates a copy that shares pages until one of
    them is written, and :meth:`free` releases its pages. ``model(tokens, cache=cache.batch([a, b]))`` appends a row of
    tokens to each of these; ``cache=cache`` means all sequences in the order of their creation. With `cu_seqlens`,
    tokens are ``[1, total]`` and sequences may get different numbers of tokens, such as a chunk of a prompt for one and
    single tokens for others. The cache is for inference: a backward pass raises RuntimeError.

    Args:
        config: the model's configuration.
        n_pages: the number of pages.
        page_size: positions of a page.
        n_sequences: for a model with linear attention, the maximum number of sequences; otherwise None.
        device, dtype: those of the keys and values that the model computes (under autocast, autocast's dtype).

    Attributes:
        k, v: for each layer ``[n_pages, page_size, Hk, D]`` and ``[n_pages, page_size, Hk, Dv]``, where D is the
            `head_dim` and Dv, unless there is a `v_head_dim`, the same; with linear attention Hk is 0.

    Raises:
        ValueError: a size below 1; `n_sequences` is missing, or is given for a model without linear attention.
    """

    def __init__(
        self,
        config: ModelConfig,
        n_pages: int,
        page_size: int = 16,
        *,
        n_sequences: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int("n_pages", n_pages, minimum=1)
        check_int("page_size", page_size, minimum=1)
        self.linear_layers, self.heads = config.linear_layers, config.cached_heads
        self._states: StateSlots | None = None
        if (n_sequences is None) == bool(config.linear_layers):
            wanted = (
                "given for a model with linear attention" if n_sequences is None else "None without linear attention"
            )
            raise ValueError(f"n_sequences must be {wanted}; got {n_sequences}")
        if n_sequences is not None:
            check_int("n_sequences", n_sequences, minimum=1)
            self._states = StateSlots(config, n_sequences, device, dtype)
        heads = [config.kv_heads * (layer in config.full_layers) for layer in range(config.n_layers)]
        self._max_len = config.max_seq_len if config.positions == "learned" else math.inf
        self.k, self.v = (
            [torch.empty(n_pages, page_size, n, width, device=device, dtype=dtype) for n in heads]
            for width in self.heads[1:]
        )
        self._pages = Pages(n_pages, page_size)

    @property
    def device(self) -> torch.device:
        return self.k[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.k[0].dtype

    @property
    def page_size(self) -> int:
        return self._pages.page_size

    @property
    def n_pages(self) -> int:
        return self._pages.n_pages

    @property
    def n_free(self) -> int:
        """The number of free pages."""
        return self._pages.n_free

    @property
    def sequences(self) -> tuple[int, ...]:
        """The numbers of the sequences, in the order of their creation."""
        return self._pages.sequences

    def add(self) -> int:
        """Creates an empty sequence without pages and returns its number.

        Raises:
            OutOfPages: with linear attention, there are `n_sequences` already.
        """
        if self._states is None:
            return self._pages.add()
        self._states.check_free()
        self._states.add(sequence := self._pages.add())
        return sequence

    def fork(self, sequence: int) -> int:
        """Creates a copy of the sequence and returns its number. Pages are shared, and a shared page is copied when one
        of the sequences writes to it. Raises OutOfPages as :meth:`add`."""
        if self._states is None:
            return self._pages.fork(sequence)
        self._states.check_free()
        self._states.add(copy := self._pages.fork(sequence), sequence)
        return copy

    def free(self, sequence: int) -> None:
        """Removes the sequence and frees the pages that it does not share."""
        self._pages.free(sequence)
        if self._states is not None:
            self._states.free(sequence)

    def length(self, sequence: int) -> int:
        """Returns the number of stored positions of the sequence."""
        return self._pages.length(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """Removes the positions of the sequence from `length` on; ValueError if it has fewer, or if `length` is neither
        0 nor its length and there is linear attention."""
        if self._states is not None and length not in (0, self.length(sequence)):
            raise ValueError(
                f"length must be 0 or stay {self.length(sequence)}: the state of linear attention does not go back to "
                f"another position; got {length}"
            )
        self._pages.truncate(sequence, length)
        if self._states is not None and length == 0:
            self._states.reset(sequence)

    def block_table(self, sequence: int) -> tuple[int, ...]:
        """Returns the pages of the sequence, in the order of its positions."""
        return self._pages.table(sequence)

    def batch(self, sequences: Sequence[int] | None = None) -> PagedBatch:
        """Returns these sequences, or all, as the rows of a batch, for `cache` of :class:`Transformer`.

        Raises:
            ValueError: an unknown number, or the same number twice.
        """
        chosen = self.sequences if sequences is None else tuple(sequences)
        for sequence in chosen:
            self.length(sequence)
        if len(set(chosen)) != len(chosen):
            raise ValueError(f"sequences must differ from each other; got {list(chosen)}")
        return PagedBatch(self, chosen)

    def check(self, device: torch.device, dtype: torch.dtype, n_layers: int) -> None:
        """Raises ValueError if this cache does not support tokens on `device` and keys of `dtype`."""
        if len(self.k) != n_layers:
            raise ValueError(f"cache holds {len(self.k)} layers; the model has {n_layers}")
        if device != self.device:
            raise ValueError(f"cache must be on the tokens' device {device}; got {self.device}")
        if dtype != self.dtype:
            raise ValueError(f"cache must have the dtype of the keys, {dtype}; got {self.dtype}")

    def reserve(self, counts: dict[int, int]) -> None:
        """Gives each sequence pages for `counts` more positions, and copies shared pages that it will write to. A step
        does this automatically.

        Raises:
            OutOfPages: there are fewer free pages; nothing has changed.
        """
        pairs = self._pages.reserve(counts)
        if pairs:
            before, after = torch.tensor(pairs, device=self.device).unbind(1)
            for stored in (*self.k, *self.v):
                stored[after] = stored[before]

    def advance(self, counts: dict[int, int]) -> None:
        """Adds the stored positions to the lengths."""
        self._pages.advance(counts)

    def __repr__(self) -> str:
        n, size, (h, d, _) = self.n_pages, self.page_size, self.heads
        linear = f", of linear attention={len(self.linear_layers)}" if self.linear_layers else ""
        most = "" if self._states is None else f"/{self._states.n_slots}"
        return (
            f"PagedKVCache(layers={len(self.k)}{linear}, n_pages={n}, page_size={size}, n_kv_heads={h}, head_dim={d}, "
            f"sequences={len(self.sequences)}{most}, free={self.n_free}/{n}, {self.dtype}, {self.device})"
        )


class PagedBatch:
    """Sequences of a :class:`PagedKVCache` as the rows of a batch; their lengths may differ."""

    def __init__(self, cache: PagedKVCache, sequences: tuple[int, ...]) -> None:
        self.cache, self.sequences = cache, sequences

    @property
    def lengths(self) -> list[int]:
        return [self.cache.length(sequence) for sequence in self.sequences]

    @property
    def length(self) -> int:
        """The longest length."""
        return max(self.lengths, default=0)

    def begin(self, tokens: Tensor, cu_seqlens: Tensor | None, dtype: torch.dtype, n_layers: int) -> PagedForward:
        """Makes room for `tokens` ``[B, T]``, or ``[1, total]`` with `cu_seqlens`, for one forward pass.

        Raises:
            ValueError: they do not fit the cache, or a sequence has states of a pass that failed.
            OutOfPages: there are fewer free pages; nothing has changed.
        """
        cache, (batch, count) = self.cache, tokens.shape
        cache.check(tokens.device, dtype, n_layers)
        rows = batch if cu_seqlens is None else len(cu_seqlens) - 1
        if rows != len(self.sequences):
            raise ValueError(f"cache's batch has {len(self.sequences)} sequences; got tokens of {rows}")
        counts = [count] * batch
        if cu_seqlens is not None:
            counts = [after - before for before, after in pairwise(cu_seqlens.tolist())]
        for sequence, length, new in zip(self.sequences, self.lengths, counts, strict=True):
            if length + new > cache._max_len:
                table = f"max_seq_len={cache._max_len}, the length of the table of learned positions"
                raise ValueError(f"sequence {sequence} holds {length} positions, and {new} more exceed {table}")
        own = dict(zip(self.sequences, counts, strict=True))
        if cache._states is not None:
            cache._states.check(self.sequences)
        cache.reserve(own)
        return PagedForward(cache, own, self._step(counts, cu_seqlens, tokens), cu_seqlens is not None)

    def _step(self, counts: list[int], cu_seqlens: Tensor | None, tokens: Tensor) -> PagedStep:
        size, lengths, device = self.cache.page_size, self.lengths, tokens.device
        tables = [self.cache.block_table(sequence) for sequence in self.sequences]
        ends = [length + count for length, count in zip(lengths, counts, strict=True)]
        columns = max((-(-end // size) for end in ends), default=0)
        each = list(zip(tables, lengths, ends, strict=True))
        at = [(p, pages[p // size], p % size) for pages, length, end in each for p in range(length, end)]

        def made(values: list[Any], dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        position, page, offset = made(at, torch.int64).reshape(-1, 3).unbind(1)
        table = [[*pages[:columns], *[0] * (columns - len(pages))] for pages in tables]
        return PagedStep(
            position.reshape(tokens.shape), page, offset, made([0, *accumulate(counts)]), made(ends),
            made(table).reshape(len(tables), columns), max(counts, default=0), max(ends, default=0),
        )  # fmt: skip


class PagedForward:
    """One forward pass. The lengths change only after all layers have run, so a pass that fails leaves the contents of
    the cache unchanged; its sequences keep their reserved pages. Only the states of linear attention are lost."""

    def __init__(self, cache: PagedKVCache, counts: dict[int, int], step: PagedStep, packed: bool) -> None:
        self.step, self._cache, self._counts, self._packed = step, cache, counts, packed
        self._slots = slice(0) if cache._states is None else cache._states.arrange(tuple(counts))

    def layer(self, index: int) -> PagedKeyValues | PagedState | tuple[PagedKeyValues, PagedState]:
        """Returns one layer's part, as :class:`foundry_kernels.nn.Attention` takes it, or of linear attention, or a
        pair for both."""
        keys = PagedKeyValues(self._cache.k[index], self._cache.v[index], self.step)
        states = self._cache._states
        if states is not None and index in self._cache.linear_layers:
            state = PagedState(states, index, tuple(self._counts), self._slots, self.step, self._packed)
            return state if keys.k.shape[2] == 0 else (keys, state)
        return keys

    def advance(self, count: int) -> None:
        """Advances each sequence's length by its new positions."""
        self._cache.advance(self._counts)
        if self._cache._states is not None:
            self._cache._states.finish(tuple(self._counts))
