"""An :class:`AttentionMask` of FlexAttention's `BlockMask`: its blocks say which pairs are hidden, which are all seen,
and where its function decides."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention import flex_attention as torchs
from torch.nn.attention.flex_attention import BlockMask
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from foundry_kernels.ops.flash_attention.attention_mask import FULL, AttentionMask, pack, pack_at_once

#: The number of pairs for which a mask's function is called at a time. It bounds the memory.
_AT_ONCE = 1 << 22

Sizes = tuple[int, int, int, int]


class _Made(NamedTuple):
    sizes: Sizes
    read: list[tuple[weakref.ref[Any], int]]  # the function and the tensors that were read, and their versions
    mask: AttentionMask | None

    def fits(self, sizes: Sizes, block_mask: BlockMask) -> bool:
        parts = [block_mask.mask_mod, *_block_tensors(block_mask)]
        same = len(parts) <= len(self.read) and all(ref() is x for x, (ref, _) in zip(parts, self.read, strict=False))
        return same and sizes == self.sizes and all(version == _version(ref()) for ref, version in self.read)


#: By the BlockMask's id. An entry lives as long as its BlockMask.
_MADE: dict[int, _Made] = {}


def _version(x: Any) -> int:
    """Changes when a tensor is changed in place; -1 of what no longer exists, so that it fits no more."""
    if x is None:
        return -1
    return x._version if isinstance(x, Tensor) and not x.is_inference() else 0


def attention_mask(block_mask: BlockMask, sizes: Sizes) -> AttentionMask | None:
    """The mask for B sequences of H heads, T queries and S keys; None if it hides nothing.

    It is made once for each BlockMask, and again if a tensor was changed in place that the BlockMask or its function
    reads. In a graph (`torch.compile`) it is made by each call, from all pairs.
    """
    _check(block_mask, sizes)
    sizes = _own_sizes(block_mask, sizes)
    if is_compiling() or type(block_mask.kv_num_blocks) is not Tensor:
        return _masked(block_mask, sizes, block_mask.mask_mod)
    key = id(block_mask)
    found = _MADE.get(key)
    if found is None or not found.fits(sizes, block_mask):
        reads = _Reads()

        def seen(*places: Tensor) -> Tensor:
            with reads:
                return block_mask.mask_mod(*places)

        with torch.inference_mode(False), torch.no_grad():
            made = _masked(block_mask, sizes, seen, in_graph=False)
        parts = [block_mask.mask_mod, *_block_tensors(block_mask), *reads.tensors.values()]
        hides = bool((made.at(*sizes[2:]).tiles != FULL).any())
        if found is None:
            weakref.finalize(block_mask, _MADE.pop, key, None)
        found = _Made(sizes, [(weakref.ref(x), _version(x)) for x in parts], made if hides else None)
        _MADE[key] = found
    return found.mask


def _check(block_mask: BlockMask, sizes: Sizes) -> None:
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask must be a BlockMask or None; got {type(block_mask).__name__}")
    if block_mask.mask_mod is None or block_mask.mask_mod is getattr(torchs, "_sliced_mask_mod_error", 0):
        raise ValueError("block_mask must have a mask_mod; that of a slice must be set, its indices begin at 0")
    lengths, wanted = tuple(block_mask.seq_lengths), sizes[2:]
    any_length = min(block_mask.BLOCK_SIZE) >= 1 << 30  # PyTorch's way to write "no mask"
    if lengths != wanted and not any_length:
        raise ValueError(
            f"block_mask must be that of {wanted[0]} queries and {wanted[1]} keys; got one of {lengths}: make another, "
            "or cut it with block_mask._adjust"
        )
    shape = tuple(block_mask.kv_num_blocks.shape[:-1])
    shape = (1,) * (2 - len(shape)) + shape
    if len(shape) > 2 or any(n not in (1, m) for n, m in zip(shape, sizes, strict=False)):
        raise ValueError(f"block_mask must have B={sizes[0]} or 1 and H={sizes[1]} or 1; got {shape}")


def _block_tensors(block_mask: BlockMask) -> list[Tensor]:
    names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
    return [x for name in names if (x := getattr(block_mask, name)) is not None]


def _own_sizes(block_mask: BlockMask, sizes: Sizes) -> Sizes:
    """The sizes, with B and H of 1 where neither the blocks nor the function vary."""
    own = (1, 1, *block_mask.kv_num_blocks.shape)[-3:-1]
    at = torch.zeros((), dtype=torch.int32, device=block_mask.kv_num_blocks.device)
    varies = [False, False]
    for dim in range(2):
        if own[dim] != 1 or sizes[dim] == 1:
            continue

        def probe(i: Tensor, dim: int = dim) -> Tensor:
            places = [at, at, at, at]
            places[dim] = i
            out = block_mask.mask_mod(*places)
            varies[dim] = not isinstance(out, Tensor) or torch._C._functorch.is_batchedtensor(out)
            return i

        torch.vmap(probe)(torch.stack([at, at]))
    batch, heads = (sizes[d] if varies[d] or own[d] != 1 else 1 for d in range(2))
    return batch, heads, sizes[2], sizes[3]


def _kinds(block_mask: BlockMask, sizes: Sizes) -> tuple[Tensor, Tensor | None]:
    """Which blocks are listed, and which of them as full: bool ``[b, h, I, J]``."""

    def listed(counts: Tensor, indices: Tensor) -> Tensor:
        counts, indices = counts[(None,) * (3 - counts.dim())], indices[(None,) * (4 - indices.dim())]
        n = indices.shape[-1]
        place = torch.arange(n, device=indices.device)
        at = torch.where(place < counts[..., None], indices.long(), n)  # what is beyond the count has no meaning
        found = torch.zeros((*indices.shape[:3], n + 1), dtype=torch.bool, device=indices.device)
        return found.scatter(3, at, True)[..., :n].expand(sizes[0], sizes[1], -1, -1)

    some = listed(block_mask.kv_num_blocks, block_mask.kv_indices)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return some, None
    return some, listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)


def _called(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A mask's function of whole tensors ``[n]``, ``[n]``, ``[n, q]`` and ``[n, k]``, to ``[n, q, k]``. It is called
    with scalars, as PyTorch does: it may index by one place after the other."""
    of_keys = torch.vmap(fn, (None, None, None, 0))
    of_queries = torch.vmap(of_keys, (None, None, 0, None))
    return torch.vmap(of_queries, (0, 0, 0, 0))


def _checked(seen: Any) -> Tensor:
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        kind = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
        raise TypeError(f"block_mask's mask_mod must return a bool tensor; got {kind}")
    return seen


def _masked(block_mask: BlockMask, sizes: Sizes, mask_mod: Callable[..., Any], in_graph: bool = True) -> AttentionMask:
    batch, heads, _, n_keys = sizes
    size_q, size_k = (min(size, max(n, 1)) for size, n in zip(block_mask.BLOCK_SIZE, sizes[2:], strict=True))
    some, full = _kinds(block_mask, sizes)
    device = some.device
    n_rows, n_columns = some.shape[2:]
    fn = _called(lambda *places: _checked(mask_mod(*places)))
    # What is beyond the last query or key gets the indices of the last: a function may read a tensor there.
    keys = torch.arange(n_columns * size_k, device=device).clamp_max(n_keys - 1).to(torch.int32)
    places = torch.arange(batch * heads, device=device, dtype=torch.int32)

    def whole(begin: int, end: int) -> Tensor:
        """Calls the function for all pairs, by operations whose shapes do not depend on values, as a graph needs."""
        rows = torch.arange(begin, end, device=device, dtype=torch.int32)
        n = places.shape[0]
        seen = fn(places // heads, places % heads, rows.expand(n, -1), keys.expand(n, -1))
        seen = seen.view(batch, heads, end - begin, -1) & _spread(some, rows // size_q, size_k)
        return (seen if full is None else seen | _spread(full, rows // size_q, size_k))[..., :n_keys]

    def blocks(begin: int, end: int) -> Tensor:
        """Calls the function for the pairs of listed blocks."""
        rows = torch.arange(begin, end, device=device, dtype=torch.int32)
        seen = torch.zeros(batch, heads, end - begin, n_columns, size_k, dtype=torch.bool, device=device)
        if full is not None:
            seen |= full[:, :, rows // size_q, :, None]
        for at in range(begin // size_q, min(-(-end // size_q), n_rows)):
            first, last = max(begin, at * size_q), min(end, (at + 1) * size_q)
            b, h, j = (x.to(torch.int32) for x in some[:, :, at].nonzero(as_tuple=True))
            step = max(1, _AT_ONCE // ((last - first) * size_k))
            for part in range(0, b.shape[0], step):
                of_b, of_h, of_j = (x[part : part + step] for x in (b, h, j))
                columns = keys.view(n_columns, size_k)[of_j]
                found = fn(of_b, of_h, rows[first - begin : last - begin].expand(of_b.shape[0], -1), columns)
                seen[of_b, of_h, first - begin : last - begin, of_j] = found
        return seen.flatten(3)[..., :n_keys]

    return AttentionMask._of(sizes, device, pack_at_once(whole, sizes) if in_graph else pack(blocks, sizes))


def _spread(blocks: Tensor, rows: Tensor, size_k: int) -> Tensor:
    return blocks[:, :, rows].repeat_interleave(size_k, 3)


class _Reads(TorchFunctionMode):
    """Collects the tensors that a mask's function reads. Its indices do not count: they are batched by `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, Tensor] = {}
        self._made: set[int] = set()  # ids, also of tensors that are gone: what was there before has none of them

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and id(x) not in self._made and not wrapped(x):
                self.tensors[id(x)] = x
        self._made.update(id(x) for x in tree_leaves(out) if isinstance(x, Tensor) and id(x) not in self.tensors)
        return out
