"""Multi-head self- or cross-attention with positions, grouped key-value heads and an optional key-value cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_rank, check_tensor
from foundry_kernels.nn._attention_checks import check_input, check_options, check_sizes
from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._head import weight_of_norm
from foundry_kernels.nn._linear_layers import Layers, layers_for
from foundry_kernels.nn._masks import check_masks, hide_padding
from foundry_kernels.nn._paged import PagedKeyValues
from foundry_kernels.nn.norm import RMSNorm
from foundry_kernels.nn.positions import AlibiSlopes
from foundry_kernels.nn.rotary import RotaryEmbedding
from foundry_kernels.nn.self_attention import KeyValueStore, SelfAttention
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.score_program.trace import ScoreFunction
from foundry_kernels.ops.rope import qk_norm_rope
from foundry_kernels.ops.swiglu import glu


class ContextKeyValues(NamedTuple):
    """Keys and values ``[B, Hk, S, D]`` of a context, as :meth:`Attention.keys_values` makes them: once, for any number
    of calls. They carry gradients to the context and to the projections."""

    k: Tensor
    v: Tensor


class Attention(SelfAttention):
    """``wo(flash_attention(rope(wq x), rope(wk x), wv x))``; the names are those of Meta's Llama.

    Queries, keys and values are ``[B, H, T, D]`` views of the projections' ``[B, T, H, D]`` memory, and the result has
    the same storage order, so nothing is copied to transpose.

    Args:
        dim: width of the input and the output.
        n_heads: query heads H.
        n_kv_heads: key-value heads Hk, a divisor of `n_heads`; None is `n_heads`. 1 is multi-query attention.
        head_dim: D; None is ``dim // n_heads``.
        rope: the rotary embedding, which layers may share, or None for no rotation.
        alibi: the slopes of ALiBi, which layers may share, or None.
        causal: whether a query sees no later key of its own sequence. A context is always seen as a whole.
        sliding_window: positions that a query sees, its own the last of them (without `causal` as many after it); None
            or -1 is unbounded.
        bias: whether the projections to queries, keys and values have one.
        out_bias: whether the output projection has a bias; None is `bias`.
        scale: factor on the scores; None is ``head_dim ** -0.5``.
        context_dim: width of the context from which keys and values are computed; None is `dim`. With another width the
            module does not support self-attention.
        qk_norm: an RMSNorm of queries and of keys, before the rotation: `q_norm` and `k_norm`.
        qk_norm_over: "head", of each head by itself, or "projection", of all heads together.
        norm_eps, norm_round_before_weight, norm_weight_offset: options of these two norms, as in :class:`RMSNorm`.
        output_gate: multiply the heads' results by ``sigmoid(wg x)`` before the output projection (Qwen3-Next).
        dropout: probability of dropping attention weights in training (`dropout_p` of :func:`flash_attention`), with a
            seed from torch's generator.
        backend: a backend's name, or a mapping of operations to names. The rotary embedding has its own backend.

    Raises:
        TypeError: a size is no int, `causal` no bool.
        ValueError: `n_heads` is no multiple of `n_kv_heads`, `dim` none of `n_heads` where head_dim is None, the rotary
            dimensions exceed `head_dim`, `alibi` has other heads, `sliding_window` is below 1, `dropout` outside
            [0, 1), `scale` is not positive, an unknown `qk_norm_over` or backend.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        rope: RotaryEmbedding | None = None,
        alibi: AlibiSlopes | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        scale: float | None = None,
        context_dim: int | None = None,
        qk_norm: bool = False,
        qk_norm_over: str = "head",
        norm_eps: float | None = None,
        norm_round_before_weight: bool = False,
        norm_weight_offset: float = 0.0,
        output_gate: bool = False,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        context_dim = dim if context_dim is None else context_dim
        head_dim = check_sizes(dim, n_heads, n_kv_heads, head_dim, context_dim)
        check_options(n_heads, head_dim, rope, alibi, causal, sliding_window, scale, qk_norm_over, dropout)
        sliding_window = None if sliding_window == -1 else sliding_window
        over_heads = qk_norm_over == "head"
        fused = ("qk_norm_rope",) if qk_norm and over_heads and rope is not None else ()
        gates = ("glu",) if output_gate else ()
        self.backends = plan(backend, ("flash_attention", *fused, *gates))  # packed or not
        self.dim, self.n_heads, self.n_kv_heads, self.head_dim = dim, n_heads, n_kv_heads, head_dim
        self.causal, self.sliding_window, self.dropout = causal, sliding_window, dropout
        self.scale, self.context_dim, self.qk_norm_over = scale, context_dim, qk_norm_over
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.wq = torch.nn.Linear(dim, n_heads * head_dim, bias=bias, **factory)
        self.wk = torch.nn.Linear(context_dim, n_kv_heads * head_dim, bias=bias, **factory)
        self.wv = torch.nn.Linear(context_dim, n_kv_heads * head_dim, bias=bias, **factory)
        self.wo = torch.nn.Linear(n_heads * head_dim, dim, bias=bias if out_bias is None else out_bias, **factory)
        self.wg = torch.nn.Linear(dim, n_heads * head_dim, bias=bias, **factory) if output_gate else None
        self.rope, self.alibi, self.norm_eps = rope, alibi, norm_eps
        self.q_norm = self.k_norm = None
        if qk_norm:
            norm: dict[str, Any] = {**factory, "round_before_weight": norm_round_before_weight, "backend": backend}
            norm["weight_offset"] = norm_weight_offset
            widths = (head_dim * (1 if over_heads else heads) for heads in (n_heads, n_kv_heads))
            self.q_norm, self.k_norm = (RMSNorm(width, norm_eps, **norm) for width in widths)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | int | None = None,
        *,
        cache: KeyValueStore | PagedKeyValues | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attn_mask: Tensor | AttentionMask | None = None,
        lengths: Tensor | None = None,
        context: Tensor | ContextKeyValues | None = None,
        context_lengths: Tensor | None = None,
        score_mod: ScoreFunction | None = None,
        return_lse: bool = False,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """x ``[B, T, dim]`` to ``[B, T, dim]``.

        Args:
            positions: of the tokens, as :class:`RotaryEmbedding` takes them; None continues the cache or starts at 0,
                in a packed batch at 0 in each sequence.
            cache: this layer's stored keys and values, to which the new ones are appended. A query then sees all stored
                keys, and the new keys up to its own. A cache in pages does not support positions, a mask or lengths.
            cu_seqlens: ``[N + 1]`` int32 or int64 of a packed batch: x is ``[1, total, dim]`` and holds N sequences one
                after the other, sequence n at the tokens ``cu_seqlens[n] .. cu_seqlens[n + 1] - 1``, which see no
                other's. Not together with a cache.
            max_seqlen: the longest of these sequences, or an upper bound. None is ``total``, which on a GPU launches
                empty programs if there are many sequences.
            attn_mask: a further restriction besides `causal` and the window: bool, floating or an
                :class:`foundry_kernels.AttentionMask`, as of :func:`flash_attention`, for ``[B, H, T, S]``; S counts
                the keys in the cache too. Not together with `cu_seqlens`.
            lengths: ``[B]`` int32 or int64: no query of sequence b sees the keys from ``lengths[b]`` on, counting those
                in the cache: they are padding at the end. (Outputs of padded queries are still computed.) Not together
                with `cu_seqlens`. A bool mask or an AttentionMask is combined with it tile by tile, which waits for a
                GPU; a floating mask is copied to ``[B, h, t, S]``, with -inf at the padding, and keeps its gradient.
            context: ``[B, S, context_dim]``, from which keys and values are computed instead of x; or the result of
                :meth:`keys_values` for it, for many calls with one context. Every query sees all of it but what
                `attn_mask` (of ``[B, H, T, S]``) and `context_lengths` hide. A context does not support positions, a
                cache, packed sequences, `lengths`, or a module with its own positions or a window.
            context_lengths: ``[B]`` int32 or int64: the positions of context b from ``context_lengths[b]`` on are
                padding, which no query sees. They are combined with a mask in the same way as `lengths`.
            score_mod: as of :func:`flash_attention`: kv_idx counts the keys in the cache, q_idx the tokens of x.
            return_lse, return_stats: also return what :func:`flash_attention` returns for them, ``[B, H, T]`` each.

        Returns:
            y, or ``(y, lse)``, ``(y, entropy, max_logit)``, ``(y, lse, entropy, max_logit)``.

        Raises:
            TypeError: cu_seqlens or lengths is not an integer tensor, or attn_mask has another type.
            ValueError: x or a context has another rank, width or batch; a packed batch has more than one row, a cache,
                a mask or lengths; a mask or lengths have another shape or device; a context is combined with an
                unsupported argument; or an error of the rotary embedding, the cache or the operations.
        """
        wanted = {"score_mod": score_mod, "return_lse": return_lse, "return_stats": return_stats}
        if context is not None:
            check_input(x, self.dim, cache, cu_seqlens, max_seqlen)
            self._check_context({"positions": positions, "cache": cache, "cu_seqlens": cu_seqlens, "lengths": lengths})
            return self._attend_to_context(x, context, attn_mask, context_lengths, wanted)
        if context_lengths is not None:
            raise ValueError("context_lengths needs a context; got context_lengths alone")
        if self.context_dim != self.dim:
            raise ValueError(f"context must be given: keys are made of width {self.context_dim}, x has {self.dim}")
        return self._attend_to_itself(x, positions, cache, cu_seqlens, max_seqlen, attn_mask, lengths, wanted)

    def keys_values(self, context: Tensor) -> ContextKeyValues:
        """Computes keys and values of a context ``[B, S, context_dim]``, for calls with ``context=``.

        Raises:
            TypeError: context is not a tensor.
            ValueError: it has another rank or width, or the module positions of its own or a window.
        """
        self._check_context({})
        check_tensor("context", context)
        check_rank("context", context, 3, f"[B, S, {self.context_dim}]")
        if context.shape[-1] != self.context_dim:
            raise ValueError(
                f"context must have context_dim={self.context_dim} as its last dimension; got {tuple(context.shape)}"
            )
        layers = layers_for(context, self.backends["flash_attention"])
        k, v = (layers.linear(context, w) for w in (self.wk, self.wv))
        return ContextKeyValues(self._heads(k, self.k_norm), self._heads(v, None))

    def _attend_to_context(
        self,
        x: Tensor,
        context: Tensor | ContextKeyValues,
        attn_mask: Tensor | AttentionMask | None,
        context_lengths: Tensor | None,
        wanted: dict[str, Any],
    ) -> Tensor | tuple[Tensor, ...]:
        k, v = context if isinstance(context, ContextKeyValues) else self.keys_values(context)
        if k.shape[0] != x.shape[0]:
            raise ValueError(f"context must have x's batch of {x.shape[0]}; got {k.shape[0]}")
        if attn_mask is not None or context_lengths is not None:
            scores = (x.shape[0], self.n_heads, x.shape[1], k.shape[2])
            check_masks(attn_mask, context_lengths, None, scores, x, "x", "context_lengths")
            if context_lengths is not None:
                attn_mask = hide_padding(attn_mask, context_lengths, k.shape[2])
        layers = layers_for(x, self.backends["flash_attention"])
        q = self._heads(layers.linear(x, self.wq), self.q_norm)
        options = self._options(False, wanted)
        return self._merge_heads(layers, x, *self._attend(q, k, v, attn_mask, None, None, options))

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Splits a projection ``[B, T, H D]`` into heads ``[B, H, T, D]`` and normalises it."""
        if norm is not None and self.qk_norm_over == "projection":
            x, norm = norm(x), None
        heads = x.unflatten(-1, (-1, self.head_dim))
        return (heads if norm is None else norm(heads)).transpose(1, 2)

    def _project(self, layers: Layers, x: Tensor, y: Tensor) -> Tensor:
        if self.wg is not None:
            y = glu(layers.linear(x, self.wg), y, backend=self.backends["glu"])
        return super()._project(layers, x, y)

    @property
    def output_projection(self) -> torch.nn.Linear:
        return self.wo

    def _check_context(self, given: dict[str, Any]) -> None:
        """Refuses arguments that are not supported with keys of another sequence."""
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"context and {name} exclude each other: its keys are of another sequence; got both")
        own = {"rope": self.rope, "alibi": self.alibi, "sliding_window": self.sliding_window}
        for name, value in own.items():
            if value is not None:
                raise ValueError(f"context needs {name}=None: queries and keys have no common positions")

    def _queries_keys_values(
        self,
        layers: Layers,
        x: Tensor,
        positions: Tensor | int | None,
        cache: KeyValueStore | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        projections = (self.wq, self.wk, self.wv)
        packed = layers.together(x, *projections)
        over_heads = self.qk_norm_over == "head"
        if packed is not None:
            if positions is None and self.q_norm is None:
                found = layers.append(packed, cache, self.rope, self.n_heads, self.n_kv_heads, self.head_dim)
                if found is not None:
                    return found
            parts = packed.split([heads * self.head_dim for heads in (self.n_heads, *[self.n_kv_heads] * 2)], -1)
        else:
            # The number of heads is taken from the projections' results: under tensor parallelism a device has a part
            # of them.
            parts = layers.each(x, *projections)
        fused = self.rope is not None and over_heads  # the norms, with the rotation
        q, k = (
            self._heads(part, None if fused else norm)
            for part, norm in zip(parts[:2], (self.q_norm, self.k_norm), strict=True)
        )
        v = self._heads(parts[2], None)
        if self.rope is not None:
            place = self._place(self.rope, x.shape[1], positions, cache, cu_seqlens, max_seqlen)
            plain = self.q_norm is None or not over_heads
            q, k = self.rope(q, k, *place) if plain else self._norm_and_rotate(q, k, *place)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    def _norm_and_rotate(
        self, q: Tensor, k: Tensor, positions: Tensor | int | None, end: int | None = None
    ) -> tuple[Tensor, Tensor]:
        rope, q_norm, k_norm = self.rope, self.q_norm, self.k_norm
        assert rope is not None
        assert q_norm is not None
        assert k_norm is not None
        cos, sin, positions = rope.tables(q.shape[2], positions, end)
        weights = weight_of_norm(q_norm, q), weight_of_norm(k_norm, k)
        return qk_norm_rope(
            q, k, *weights, cos, sin, eps=self.norm_eps, positions=positions,
            weight_offset=q_norm.weight_offset, round_before_weight=q_norm.round_before_weight,
            interleaved=rope.interleaved, backend=self.backends["qk_norm_rope"],
        )  # fmt: skip

    def extra_repr(self) -> str:
        extra = "" if self.sliding_window is None else f"sliding_window={self.sliding_window}, "
        extra += f"dropout={self.dropout}, " if self.dropout else ""
        extra += f"scale={self.scale}, " if self.scale is not None else ""
        extra += "output_gate=True, " if self.wg is not None else ""
        extra += f"context_dim={self.context_dim}, " if self.context_dim != self.dim else ""
        return (
            f"{self.dim}, n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, {extra}backend={describe(self.backends)}"
        )
