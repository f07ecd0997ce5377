"""The cache of a model with linear attention: states beside keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.models.cache import KVCache, LayerCache
from foundry_kernels.models.config import ModelConfig
from foundry_kernels.models.state_slots import make_states
from foundry_kernels.nn import GatedDeltaState
from foundry_kernels.nn.linear_attention import LinearMixer


class HybridCache(KVCache):
    """A :class:`KVCache` for a model with linear attention: keys and values of the layers with full attention, and for
    each layer with linear attention a :class:`foundry_kernels.nn.GatedDeltaState`, whose size does not depend on the
    length.

    The arguments and attributes are those of :class:`KVCache`, with the differences:

    Attributes:
        length: it may only be set to 0, which empties the cache: a state does not go back to an earlier position.
        k, v: of a layer with linear attention they have 0 heads.
        states: for each layer its state, or None.
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
        self._length, self._written = 0, False
        self.states: list[GatedDeltaState | None] = [None] * config.n_layers
        super().__init__(config, batch_size, max_len, device=device, dtype=dtype)
        self.states = make_states(config, batch_size, device, dtype)

    @property
    def length(self) -> int:
        return self._length

    @length.setter
    def length(self, value: int) -> None:
        if value not in (0, self._length):
            raise ValueError(
                f"length must be set to 0 or stay {self._length}: the state of linear attention does not go back to "
                f"another position; got {value}"
            )
        if value == 0:
            for state in self.states:
                if state is not None:
                    state.reset()
            self._written = False
        self._length = value

    def check(self, tokens: Tensor, dtype: torch.dtype, n_layers: int) -> None:
        super().check(tokens, dtype, n_layers)
        if self._written:
            raise ValueError(
                "cache holds states of a forward pass that failed, so its layers are at different positions; set its "
                "length to 0 and read the sequence again"
            )

    def layer(self, index: int) -> Any:
        """Returns one layer's part: a :class:`LayerState` for linear attention, or a pair for both."""
        if self.states[index] is None:
            return LayerCache(self, index)
        state = LayerState(self, index)
        return state if self.k[index].shape[1] == 0 else (LayerCache(self, index), state)

    def advance(self, count: int) -> None:
        self._length += count
        self._written = False

    def __repr__(self) -> str:
        linear = sum(state is not None for state in self.states)
        b, _, s, d = self.k[0].shape
        heads = max(k.shape[1] for k in self.k)
        return (
            f"HybridCache(layers={len(self.k)}, of linear attention={linear}, batch_size={b}, n_kv_heads={heads}, "
            f"head_dim={d}, length={self.length}/{s}, {self.dtype}, {self.device})"
        )


class LayerState:
    """A layer of linear attention of a :class:`HybridCache`."""

    def __init__(self, cache: HybridCache, index: int) -> None:
        self._cache, self._index = cache, index

    @property
    def length(self) -> int:
        return self._cache.length

    @property
    def state(self) -> GatedDeltaState:
        """The state, which the caller overwrites."""
        state = self._cache.states[self._index]
        assert state is not None
        self._cache._written = True
        return state

    def read(self, attention: LinearMixer, y: Tensor) -> Tensor:
        """Returns ``attention(y)``, which continues the sequences and overwrites their states."""
        found: Tensor = attention(y, state=self.state)
        return found
