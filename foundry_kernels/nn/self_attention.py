"""What modules of attention do between their projections: the cache, masks, packed sequences and the operation."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from foundry_kernels.nn._attention_checks import check_input
from foundry_kernels.nn._linear_layers import Layers, layers_for
from foundry_kernels.nn._masks import check_masks, hide_padding, packed_positions
from foundry_kernels.nn._paged import PagedKeyValues
from foundry_kernels.nn._scripting import refuse_scripting
from foundry_kernels.nn.positions import AlibiSlopes
from foundry_kernels.nn.rotary import RotaryEmbedding
from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask


class KeyValueStore(Protocol):
    """The interface of one layer's part of a cache, as modules of attention use it."""

    @property
    def length(self) -> int:
        """Positions stored so far: the position of the next token."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k ``[B, Hk, T, D]`` and v ``[B, Hk, T, Dv]`` of the next T positions and returns those of all
        positions, ``[B, Hk, S, D]`` and ``[B, Hk, S, Dv]``."""


class Attend(Protocol):
    """A replacement of `flash_attention` in a :class:`SelfAttention`, which `fk.distributed.context_parallel` sets."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, **options: Any) -> Any:
        """Computes `flash_attention` or `flash_attention_varlen`, with q, k, v ``[B, H, T, D]`` in both cases."""


class SelfAttention(torch.nn.Module):
    """The base of :class:`Attention` and :class:`LatentAttention`, which set the attributes."""

    __prepare_scriptable__ = refuse_scripting

    backends: dict[str, str]
    dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    causal: bool
    sliding_window: int | None
    dropout: float
    scale: float | None
    rope: RotaryEmbedding | None
    alibi: AlibiSlopes | None
    attend: Attend | None = None

    def _queries_keys_values(
        self,
        layers: Layers,
        x: Tensor,
        positions: Tensor | int | None,
        cache: KeyValueStore | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the rotated queries of x, and the keys and values of the cache followed by those of x."""
        raise NotImplementedError

    @property
    def output_projection(self) -> torch.nn.Linear:
        """The projection whose result is added to the residual stream."""
        raise NotImplementedError

    def _project(self, layers: Layers, x: Tensor, y: Tensor) -> Tensor:
        """The module's result for the heads' results y ``[B, T, H Dv]``."""
        return layers.linear(y, self.output_projection)

    def _attend_to_itself(
        self,
        x: Tensor,
        positions: Tensor | int | None,
        cache: KeyValueStore | PagedKeyValues | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        attn_mask: Tensor | AttentionMask | None,
        lengths: Tensor | None,
        wanted: dict[str, Any],
    ) -> Tensor | tuple[Tensor, ...]:
        check_input(x, self.dim, cache, cu_seqlens, max_seqlen)
        if isinstance(cache, PagedKeyValues):
            given: dict[str, Any] = {"positions": positions, "attn_mask": attn_mask, "lengths": lengths}
            return self._attend_to_pages(x, cache, given, wanted)
        if attn_mask is not None or lengths is not None:
            n_keys = x.shape[1] if cache is None else cache.length + x.shape[1]
            check_masks(attn_mask, lengths, cu_seqlens, (x.shape[0], self.n_heads, x.shape[1], n_keys), x, "x")
            if lengths is not None:
                attn_mask = hide_padding(attn_mask, lengths, n_keys)
        layers = layers_for(x, self.backends["flash_attention"])
        q, k, v = self._queries_keys_values(layers, x, positions, cache, cu_seqlens, max_seqlen)
        options = self._options(self.causal, wanted)
        found = self._attend(q, k, v, attn_mask, cu_seqlens, max_seqlen, options)
        return self._merge_heads(layers, x, *found)

    def _attend_to_pages(
        self, x: Tensor, cache: PagedKeyValues, given: dict[str, Any], wanted: dict[str, Any]
    ) -> Tensor | tuple[Tensor, ...]:
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{name} and a cache in pages exclude each other; got both")
        layers = layers_for(x, self.backends["flash_attention"])
        q, k, v = self._queries_keys_values(layers, x, cache.positions, None, None, cache.step.max_seqlen_k)
        options = self._options(self.causal, wanted)
        return self._merge_heads(layers, x, *cache.attend(q, k, v, options))

    def _place(
        self,
        rope: RotaryEmbedding,
        total: int,
        positions: Tensor | int | None,
        cache: KeyValueStore | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> tuple[Any, ...]:
        """The positions of `total` tokens and, if it is known, a number above them, as `rope` takes both."""
        if positions is None and cache is not None:
            positions = cache.length
        elif positions is None and cu_seqlens is not None:
            positions = packed_positions(cu_seqlens, total)
        end = max_seqlen
        if cu_seqlens is not None and max_seqlen is None and not rope.follows_length:
            end = total  # with frequencies that follow the length too loose a bound
        return (positions,) if end is None else (positions, end)

    def _options(self, causal: bool, wanted: dict[str, Any]) -> dict[str, Any]:
        """The operation's keyword arguments."""
        window = None if self.sliding_window is None else (self.sliding_window - 1, self.sliding_window - 1)
        return {
            "causal": causal, "scale": self.scale, "window": window,
            "alibi_slopes": None if self.alibi is None else self.alibi.slopes,
            "dropout_p": self.dropout if self.training else 0.0,
            "backend": self.backends["flash_attention"], **wanted,
        }  # fmt: skip

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | AttentionMask | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, ...]:
        """The heads' results ``[B, H, T, Dv]``, and what is returned for each row ``[B, H, T]``."""
        if self.attend is not None:
            score_mod = options.pop("score_mod")
            for name, value in (("attn_mask", attn_mask), ("score_mod", score_mod)):
                if value is not None:
                    raise ValueError(f"{name} must be None if a sequence is sharded over processes; got {value!r}")
            result = self.attend(q, k, v, cu_seqlens, **options)
            return result if isinstance(result, tuple) else (result,)
        if cu_seqlens is None:
            result = flash_attention(q, k, v, attn_mask=attn_mask, **options)
            return result if isinstance(result, tuple) else (result,)
        max_seqlen = q.shape[2] if max_seqlen is None else max_seqlen
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
        result = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
        out, *rows = result if isinstance(result, tuple) else (result,)
        return out.transpose(0, 1).unsqueeze(0), *(t.unsqueeze(0) for t in rows)

    def _merge_heads(self, layers: Layers, x: Tensor, out: Tensor, *rows: Tensor) -> Tensor | tuple[Tensor, ...]:
        # A view where the operation kept q's storage order, as it promises.
        y = self._project(layers, x, out.transpose(1, 2).flatten(2))
        return (y, *rows) if rows else y
