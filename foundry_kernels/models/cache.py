"""A key-value cache, so that generation only computes new positions."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from foundry_kernels.core.inference import recorded, without_backward
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.context import Context
from foundry_kernels.models.validate import check_cache, refuse_linear
from foundry_kernels.nn._linear_layers import KeyValueMemory
from foundry_kernels.nn._paged import NO_GRADIENT

Forward = TypeVar("Forward", bound=Callable[..., Any])


def without_graph(forward: Forward) -> Forward:
    """Wraps a model's `forward`: a call with a cache saves nothing for a backward pass in any mode, and a backward pass
    through its results raises RuntimeError."""

    @wraps(forward)
    def call(self: Any, *args: Any, cache: Any = None, **options: Any) -> Any:
        if cache is None or not torch.is_grad_enabled():
            return forward(self, *args, cache=cache, **options)
        context = options.get("context")
        read = context.layers if isinstance(context, Context) else context
        wanted = recorded(*self.parameters(), *tree_leaves((args, options, read)))
        with torch.no_grad():
            result = forward(self, *args, cache=cache, **options)
        return tree_map(lambda x: _without_backward(x, wanted), result)

    return call  # type: ignore[return-value]  # `wraps` loses the type


def _without_backward(x: Any, wanted: list[Tensor]) -> Any:
    found = isinstance(x, Tensor) and x.is_floating_point()
    return without_backward((x,), wanted, NO_GRADIENT)[0] if found else x


class KVCache:
    """Preallocated keys and values of every layer, appended to in place; stored values are never copied.

    Memory: ``2 * n_layers * batch_size * n_kv_heads * max_len * head_dim`` elements, or with `v_head_dim` ``head_dim +
    v_head_dim`` in the place of ``2 * head_dim``.

    Args:
        config: the model's configuration.
        batch_size: number of sequences, which always have the same length.
        max_len: number of positions that the cache can hold; None is ``config.max_seq_len``, which is also the limit
            with learned positions.
        device, dtype: those of the keys and values that the model computes (under autocast, autocast's dtype).

    Attributes:
        length: number of positions stored. Setting it to a smaller number discards later positions.
        k, v: for each layer ``[B, Hk, max_len, D]`` and ``[B, Hk, max_len, Dv]``.

    Raises:
        ValueError: a size below 1, or `max_len` beyond the table of learned positions.
    """

    def __init__(
        self,
        config: ModelConfig,
        batch_size: int,
        max_len: int | None = None,
        *,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        max_len = config.max_seq_len if max_len is None else max_len
        check_cache(config, batch_size, max_len)
        if type(self) is KVCache:
            refuse_linear(config, "KVCache (HybridCache does, which Transformer.make_cache returns)")
        self.linear_layers = config.linear_layers
        heads = [config.kv_heads * (layer in config.full_layers) for layer in range(config.n_layers)]
        self.batch_size, self.max_len, self.length = batch_size, max_len, 0
        self.k, self.v = (
            [torch.empty(batch_size, n, max_len, width, device=device, dtype=dtype) for n in heads]
            for width in (config.head_width, config.value_width)
        )

    @property
    def device(self) -> torch.device:
        return self.k[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.k[0].dtype

    def check(self, tokens: Tensor, dtype: torch.dtype, n_layers: int) -> None:
        """Raises ValueError if the keys and values of `tokens` ``[B, T]`` cannot be appended."""
        if len(self.k) != n_layers:
            raise ValueError(f"cache holds {len(self.k)} layers; the model has {n_layers}")
        if tokens.shape[0] != self.batch_size:
            raise ValueError(f"cache was made for a batch of {self.batch_size}; got tokens {tuple(tokens.shape)}")
        if tokens.device != self.device:
            raise ValueError(f"cache must be on the tokens' device {tokens.device}; got {self.device}")
        if dtype != self.dtype:
            raise ValueError(f"cache must have the dtype of the keys, {dtype}; got {self.dtype}")
        if self.length + tokens.shape[1] > self.max_len:
            raise ValueError(
                f"cache is full: it holds {self.length} of max_len={self.max_len} positions, "
                f"{tokens.shape[1]} more do not fit"
            )

    def layer(self, index: int) -> LayerCache:
        """Returns one layer's part, as :class:`foundry_kernels.nn.Attention` takes it."""
        return LayerCache(self, index)

    def advance(self, count: int) -> None:
        """Advances the length by `count`, after every layer has appended."""
        self.length += count

    def __repr__(self) -> str:
        b, h, s, d = self.k[0].shape
        return (
            f"KVCache(layers={len(self.k)}, batch_size={b}, n_kv_heads={h}, head_dim={d}, "
            f"length={self.length}/{s}, {self.dtype}, {self.device})"
        )


class LayerCache(KeyValueMemory):
    """One layer of a :class:`KVCache`. `KVCache.advance` changes the length after all layers have run, so a forward
    pass that fails leaves the cache unchanged."""

    def __init__(self, cache: KVCache, index: int) -> None:
        self._cache, self._index = cache, index

    @property
    def length(self) -> int:
        return self._cache.length

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends k ``[B, Hk, T, D]`` and v ``[B, Hk, T, Dv]`` and returns views of all S positions.

        Raises:
            ValueError: they do not fit the cache.
        """
        cache = self._cache
        stored_k, stored_v = cache.k[self._index], cache.v[self._index]
        start, stop = cache.length, cache.length + k.shape[2]
        for name, new, stored in (("k", k, stored_k), ("v", v, stored_v)):
            b, h, s, d = stored.shape
            if new.shape != (b, h, stop - start, d) or stop > s:
                raise ValueError(f"{name} must fit [{b}, {h}, at most {s - start}, {d}]; got {tuple(new.shape)}")
            if new.dtype != stored.dtype or new.device != stored.device:
                raise ValueError(
                    f"{name} must be {stored.dtype} on {stored.device}, as the cache is; "
                    f"got {new.dtype} on {new.device}"
                )
        stored_k[:, :, start:stop] = k
        stored_v[:, :, start:stop] = v
        return stored_k[:, :, :stop], stored_v[:, :, :stop]

    def memory(self, new: Tensor, n_kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Returns the layer's whole memory ``[B, Hk, max_len, D]``, to which the caller appends `new` ``[B, T, ...]``.

        Raises:
            ValueError: it does not fit the cache.
        """
        cache = self._cache
        k, v = cache.k[self._index], cache.v[self._index]
        b, h, s, d = k.shape
        batch, count = new.shape[:2]
        if batch != b or n_kv_heads != h or {head_dim} != {d, v.shape[3]} or cache.length + count > s:
            got = (batch, n_kv_heads, count, head_dim)
            raise ValueError(f"k must fit [{b}, {h}, at most {s - cache.length}, {d}]; got {got}")
        if new.dtype != k.dtype or not k.is_cpu:
            raise ValueError(f"k must be {k.dtype} on {k.device}, as the cache is; got {new.dtype} on {new.device}")
        return k, v
