"""A block-sparse attention mask: which tiles of queries and keys are empty or full, and the bits of all other tiles.

A mask has two tensors: `tiles`, an int32 ``[b, h, I, J]`` with one index for every 64 queries and 64 keys, and `bits`,
an int64 ``[n, 64]``, in which bit j of word i says whether query i of a tile sees its key j. A tile is an index into
`bits`. Index 0 has no bit set and index 1 has all bits set, so kernels skip a tile by its index and treat all others
alike. A dimension along which a mask does not vary has size 1.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from foundry_kernels.core.checks import check_int, check_integer, check_tensor, device_or_default

TILE = 64
EMPTY, FULL = 0, 1
#: The number of mask elements that are processed at a time when a mask is built. It bounds the memory.
_AT_ONCE = 1 << 24

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class Tiles(NamedTuple):
    tiles: Tensor  # int32 [b, h, I, J]
    bits: Tensor  # int64 [n, 64]


class AttentionMask:
    """Which keys each query sees, for `attn_mask` of :func:`flash_attention`: tiles of 64 queries and 64 keys in which
    no query sees any key are skipped. Tiles in which every query sees every key are not masked.

    Build it once and use it in all layers and steps. It takes four bytes per tile, and one bit per pair in tiles that
    are neither empty nor full. ``a & b`` allows the pairs that both masks allow, ``a | b`` those that either allows.

    Args:
        mask: a bool tensor that broadcasts to ``[B, H, T, S]``, True where a query sees a key. It is read once and not
            stored.

    Attributes:
        shape: ``(b, h, T, S)``; b and h are 1 if the mask is the same for all sequences or heads; T and S are None if
            it fits any number of queries or keys.
        device: the device of its tensors, which must be the queries' device.

    Raises:
        TypeError: mask is not a bool tensor. ValueError: it has more than four dimensions.
    """

    def __init__(self, mask: Tensor) -> None:
        check_tensor("mask", mask)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be bool, a bias is passed as it is; got {mask.dtype}")
        if mask.dim() > 4:
            raise ValueError(f"mask must broadcast to [B, H, T, S]; got shape {tuple(mask.shape)}")
        mask = mask.detach()[(None,) * (4 - mask.dim())]
        b, h, t, s = mask.shape
        rows, cols = (TILE if n == 1 else n for n in (t, s))  # one row or column is that of any number of them
        whole = mask.expand(b, h, rows, cols)
        fixed = pack(lambda begin, end: whole[:, :, begin:end], (b, h, rows, cols))
        self._set((b, h, None if t == 1 else t, None if s == 1 else s), mask.device, fixed)

    def _set(
        self,
        shape: tuple[int, int, int | None, int | None],
        device: torch.device,
        fixed: Tiles | None = None,
        build: Callable[[int, int], Tiles] | None = None,
    ) -> None:
        """fixed: the tensors where they are the same for all numbers of queries and keys that fit; else `build`."""
        self.shape, self.device = shape, device
        self._fixed, self._build = fixed, build
        self._built: dict[tuple[int, int], Tiles] = {}

    @classmethod
    def _of(cls, *args: Any) -> AttentionMask:
        """Returns a mask of these arguments of `_set`."""
        made = cls.__new__(cls)
        made._set(*args)
        return made

    @classmethod
    def from_function(
        cls, fn: MaskFunction, B: int | None, H: int | None, T: int, S: int, device: Any = None
    ) -> AttentionMask:
        """Builds the mask that `fn` describes, like a `mask_mod` of FlexAttention.

        Args:
            fn: of (batch, head, query, key), int64 tensors that broadcast, to a bool tensor of their shape.
            B, H: how many sequences and heads, None where the mask is that of all of them.
            T, S: queries and keys.
            device: of the indices that fn gets, and of the mask; None is torch's default device.

        `fn` is called with the rows of a few tiles at a time, and its results are not stored.
        """
        for name, n in (("B", B), ("H", H)):
            if n is not None:
                check_int(name, n, 1)
        check_int("T", T, 1)
        check_int("S", S, 1)
        device = device_or_default(device)
        shape = (B or 1, H or 1, T, S)

        def rows(begin: int, end: int) -> Tensor:
            ranges = ((0, shape[0]), (0, shape[1]), (begin, end), (0, S))
            indices = [torch.arange(*r, device=device).view([-1 if i == d else 1 for i in range(4)])
                       for d, r in enumerate(ranges)]  # fmt: skip
            seen = fn(*indices)
            if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
                kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
                raise TypeError(f"fn must return a bool tensor; got {kind}")
            return seen.expand(shape[0], shape[1], end - begin, S)

        return cls._of(shape, device, pack(rows, shape))

    @classmethod
    def documents(cls, cu_seqlens: Tensor) -> AttentionMask:
        """The mask of documents that are packed in each row and do not see each other.

        Args:
            cu_seqlens: ``[N + 1]`` int32 or int64: where each document begins, from 0 to the number of tokens T.

        Returns:
            a mask of T queries and T keys, the same for all sequences and heads.
        """
        check_integer("cu_seqlens", cu_seqlens, 1, "[N + 1]")
        total = int(cu_seqlens[-1]) if cu_seqlens.numel() else 0
        if total == 0 or cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
            raise ValueError(f"cu_seqlens must start at 0, never decrease and end above 0; got {cu_seqlens.tolist()}")
        token = torch.arange(-(-total // TILE) * TILE, device=cu_seqlens.device).clamp_max(total - 1)
        document = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True).view(-1, TILE)
        first, last = document[:, 0], document[:, -1]
        apart = (last[:, None] < first) | (last < first[:, None])
        one = (first == last)[:, None] & (first == last) & (first[:, None] == first)
        mixed = ~(apart | one)
        at_q, at_k = mixed.nonzero(as_tuple=True)
        words = _words(document[at_q, :, None] == document[at_k, None])
        fixed = _number([_Strip(mixed[None, None], one[None, None], words)])
        return cls._of((1, 1, total, total), token.device, fixed)

    @classmethod
    def prefix(cls, lengths: Tensor) -> AttentionMask:
        """The mask that lets all queries of sequence b see the keys ``j < lengths[b]``.

        Combined with `causal`, or by ``&`` with another mask, it hides padding at the end of each sequence;
        ``prefix(lengths) | causal`` is the mask of a prefix language model.

        Args:
            lengths: ``[B]`` int32 or int64, at least 0.

        Returns:
            a mask of any number of queries and keys. No value is read, so this does not wait for a GPU.
        """
        check_integer("lengths", lengths, 1, "[B]")
        shape = (lengths.shape[0], 1, None, None)
        return cls._of(shape, lengths.device, None, partial(_prefix_tiles, lengths.long()))

    def at(self, n_queries: int, n_keys: int) -> Tiles:
        """The tensors for this number of queries and keys, cached for the next call."""
        for name, own, asked in (("T", self.shape[2], n_queries), ("S", self.shape[3], n_keys)):
            if own is not None and own != asked:
                raise ValueError(f"attn_mask must be that of {name}={asked} tokens; got a mask of {own}")
        if self._fixed is not None:
            return self._fixed
        found = self._built.get((n_queries, n_keys))
        if found is None:
            assert self._build is not None
            found = self._built[n_queries, n_keys] = self._build(n_queries, n_keys)
        return found

    def dense(self, n_queries: int | None = None, n_keys: int | None = None) -> Tensor:
        """The mask as a bool tensor ``[b, h, T, S]``; the numbers must be given where `shape` has None."""
        t, s = n_queries or self.shape[2], n_keys or self.shape[3]
        if t is None or s is None:
            raise ValueError(f"n_queries and n_keys must be given: the mask fits any; got {n_queries} and {n_keys}")
        return dense(*self.at(t, s), t, s)

    def to(self, device: Any) -> AttentionMask:
        """The mask on another device."""
        device = torch.device(device)
        if device == self.device:
            return self
        fixed = None if self._fixed is None else Tiles(*(x.to(device) for x in self._fixed))
        return self._of(self.shape, device, fixed, None if self._build is None else partial(_moved, self, device))

    def __and__(self, other: AttentionMask) -> AttentionMask:
        return self._combined(other, torch.bitwise_and)

    def __or__(self, other: AttentionMask) -> AttentionMask:
        return self._combined(other, torch.bitwise_or)

    def _combined(self, other: AttentionMask, op: Callable[[Tensor, Tensor], Tensor]) -> AttentionMask:
        if not isinstance(other, AttentionMask):
            return NotImplemented
        if self.device != other.device:
            raise ValueError(f"masks must be on one device; got {self.device} and {other.device}")
        sizes: list[int | None] = []
        for name, a, b in zip("BHTS", self.shape, other.shape, strict=True):
            any_size = 1 if name in "BH" else None
            if a != any_size and b != any_size and a != b:
                raise ValueError(f"masks must have the same {name}; got {a} and {b}")
            sizes.append(b if a == any_size else a)
        build = partial(_combine, self, other, op)
        batch, heads, t, s = sizes
        assert batch is not None
        assert heads is not None
        fixed = None if t is None or s is None else build(t, s)
        return self._of((batch, heads, t, s), self.device, fixed, build)

    def __repr__(self) -> str:
        b, h, t, s = self.shape
        kept = self._fixed or next(iter(self._built.values()), None)
        parts = ""
        if kept is not None and not kept.tiles.is_meta:
            counts = [int((kept.tiles == kind).sum()) for kind in (EMPTY, FULL)]
            parts = f", tiles={kept.tiles.numel()} of which {counts[0]} are empty and {counts[1]} full"
        return f"AttentionMask(B={b}, H={h}, T={t or 'any'}, S={s or 'any'}{parts})"


def dense(tiles: Tensor, bits: Tensor, n_queries: int, n_keys: int) -> Tensor:
    """The bool tensor ``[b, h, T, S]`` of a mask's tensors."""
    b, h, _, _ = tiles.shape
    tiles = tiles.expand(b, h, -(-n_queries // TILE), -(-n_keys // TILE)).long()
    seen = bits[tiles][..., None] >> torch.arange(TILE, device=bits.device) & 1  # [b, h, I, J, 64, 64]
    return seen.bool().transpose(3, 4).flatten(4).flatten(2, 3)[:, :, :n_queries, :n_keys]


def _words(seen: Tensor) -> Tensor:
    """The bits ``[n, 64]`` of bool tiles ``[n, 64, 64]``."""
    weights = (1 << torch.arange(8, device=seen.device)).to(torch.uint8)
    octets = (seen.reshape(-1, TILE, 8, 8).to(torch.uint8) * weights).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int64).squeeze(-1)


def _with_constants(words: Tensor) -> Tensor:
    """The bits, with those of an empty and of a full tile in front."""
    constant = torch.tensor([[0], [-1]], device=words.device).expand(2, TILE)
    return torch.cat([constant, words])


class _Strip(NamedTuple):
    """Some rows of tiles of a mask."""

    mixed: Tensor  # bool [b, h, i, J]: which tiles are neither empty nor full
    full: Tensor
    words: Tensor  # of those that are mixed, in their order


def _number(strips: list[_Strip]) -> Tiles:
    """The tiles of a mask from its strips, from the first row to the last."""
    parts, first = [], 2
    for mixed, full, words in strips:
        numbers = first - 1 + mixed.flatten().cumsum(0).view(mixed.shape)
        parts.append(torch.where(mixed, numbers, full.long()).to(torch.int32))
        first += words.shape[0]
    return Tiles(torch.cat(parts, 2), _with_constants(torch.cat([strip.words for strip in strips])))


def pack(rows: Callable[[int, int], Tensor], shape: tuple[int, int, int, int]) -> Tiles:
    """The tiles of a mask of which ``rows(begin, end)`` are the queries begin .. end - 1 ``[b, h, end - begin, S]``."""
    b, h, t, s = shape
    step = max(1, _AT_ONCE // max(b * h * s * TILE, 1)) * TILE
    strips = []
    for begin in range(0, max(t, 1), step):  # without queries one strip without tiles
        seen = rows(begin, min(begin + step, t))
        some = _by_tile(seen, False)
        full = _by_tile(seen, True).flatten(4).all(-1)
        mixed = some.flatten(4).any(-1) & ~full
        strips.append(_Strip(mixed, full, _words(some[mixed])))
    return _number(strips)


def pack_at_once(rows: Callable[[int, int], Tensor], shape: tuple[int, int, int, int]) -> Tiles:
    """The same by operations whose shapes do not depend on values, for graphs; the bits of all tiles are kept."""
    seen = rows(0, shape[2])
    words = _words(_by_tile(seen, False))
    full = _by_tile(seen, True).flatten(4).all(-1)
    number = torch.arange(2, 2 + full.numel(), device=full.device).view(full.shape)
    empty = (words == 0).all(-1).view(full.shape)
    tiles = torch.where(full, FULL, torch.where(empty, EMPTY, number)).to(torch.int32)
    return Tiles(tiles, _with_constants(words))


def _by_tile(seen: Tensor, beyond: bool) -> Tensor:
    """``[b, h, I, J, 64, 64]``; what is beyond the mask is `beyond`."""
    rest = (-seen.shape[3] % TILE, -seen.shape[2] % TILE)
    if any(rest):
        seen = pad(seen, (0, rest[0], 0, rest[1]), value=beyond)
    return seen.unflatten(3, (-1, TILE)).unflatten(2, (-1, TILE)).transpose(3, 4)


def _prefix_tiles(lengths: Tensor, n_queries: int, n_keys: int) -> Tiles:
    """Each sequence has at most one tile that is neither empty nor full; its bits are always stored."""
    start = torch.arange(0, n_keys, TILE, device=lengths.device)
    seen = lengths[:, None] - start
    mixed_tile = 2 + torch.arange(lengths.shape[0], device=lengths.device)[:, None]
    tiles = torch.where(seen >= (n_keys - start).clamp_max(TILE), FULL, torch.where(seen <= 0, EMPTY, mixed_tile))
    words = ((1 << lengths % TILE) - 1)[:, None].expand(-1, TILE)
    return Tiles(tiles.to(torch.int32)[:, None, None], _with_constants(words))


def _combine(
    a: AttentionMask, b: AttentionMask, op: Callable[[Tensor, Tensor], Tensor], n_queries: int, n_keys: int
) -> Tiles:
    """Combines the tiles of both masks pair by pair. The bits of each distinct pair are computed once."""
    of_a, of_b = a.at(n_queries, n_keys), b.at(n_queries, n_keys)
    n_b = of_b.bits.shape[0]
    pairs, tiles = torch.unique(of_a.tiles.long() * n_b + of_b.tiles, return_inverse=True)
    words = op(of_a.bits[pairs // n_b], of_b.bits[pairs % n_b])
    full, mixed = (words == -1).all(1), ~((words == -1).all(1) | (words == 0).all(1))
    numbers = torch.where(mixed, 1 + mixed.cumsum(0), full.long()).to(torch.int32)
    return Tiles(numbers[tiles], _with_constants(words[mixed]))


def _moved(mask: AttentionMask, device: torch.device, n_queries: int, n_keys: int) -> Tiles:
    tiles, bits = mask.at(n_queries, n_keys)
    return Tiles(tiles.to(device), bits.to(device))
