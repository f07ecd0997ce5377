"""Multi-head attention with its positions, shared key-value heads and an optional key-value cache."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_integer, check_rank, check_tensor
from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._decode import Layers, layers_for
from foundry_kernels.nn._masks import check_masks, hide_padding, packed_positions
from foundry_kernels.nn.norm import RMSNorm
from foundry_kernels.nn.positions import AlibiSlopes
from foundry_kernels.nn.rotary import RotaryEmbedding
from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.rope import qk_norm_rope


class KeyValueStore(Protocol):
    """What :class:`Attention` asks of a cache: one layer's part of it."""

    @property
    def length(self) -> int:
        """Positions stored so far: the position of the next token."""

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v ``[B, Hk, T, D]`` of the next T positions; return those of all positions ``[B, Hk, S, D]``."""


class Attention(torch.nn.Module):
    """``wo(flash_attention(rope(wq x), rope(wk x), wv x))``; the names are those of Meta's Llama.

    Queries, keys and values are ``[B, H, T, D]`` views of the projections' ``[B, T, H, D]`` memory, and the result
    has the same storage order: nothing is copied to transpose.

    Args:
        dim: width of the input and the output.
        n_heads: query heads H.
        n_kv_heads: key-value heads Hk, a divisor of `n_heads`; None is `n_heads`. 1 is multi-query attention.
        head_dim: D; None is ``dim // n_heads``.
        rope: the rotary embedding, which layers may share, or None for no rotation.
        alibi: the slopes of ALiBi, which layers may share, or None.
        causal: whether a query sees no later key.
        sliding_window: positions that a query sees, its own the last of them (without `causal` as many after it); None
            is unbounded.
        bias: whether the projections to queries, keys and values have one.
        out_bias: whether the projection from attention has one; None is `bias`.
        qk_norm: an RMSNorm of each head of queries and of keys, before the rotation: `q_norm` and `k_norm`.
        norm_eps, norm_round_before_weight: of these two, as of :class:`RMSNorm`.
        dropout: of the weights of attention, in training: `dropout_p` of :func:`flash_attention`, with a seed from
            torch's generator.
        backend: a backend's name, or a mapping of operations to names. The rotary embedding has its own.

    Raises:
        ValueError: `n_heads` is no multiple of `n_kv_heads`, `dim` none of `n_heads` where head_dim is None, the rotary
            dimensions exceed `head_dim`, `alibi` has other heads, `sliding_window` is below 1, `dropout` outside
            [0, 1), an unknown backend.
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
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
        norm_round_before_weight: bool = False,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        n_kv_heads = n_heads if n_kv_heads is None else n_kv_heads
        for name, value in (("dim", dim), ("n_heads", n_heads), ("n_kv_heads", n_kv_heads)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        if n_heads % n_kv_heads:
            raise ValueError(f"n_heads must be a multiple of n_kv_heads={n_kv_heads}; got {n_heads}")
        if head_dim is None:
            if dim % n_heads:
                raise ValueError(f"dim must be a multiple of n_heads={n_heads} unless head_dim is given; got {dim}")
            head_dim = dim // n_heads
        if head_dim < 1:
            raise ValueError(f"head_dim must be at least 1; got {head_dim}")
        if rope is not None and rope.dim > head_dim:
            raise ValueError(f"rope must rotate at most head_dim={head_dim} dimensions; got {rope.dim}")
        if alibi is not None and alibi.n_heads != n_heads:
            raise ValueError(f"alibi must have a slope for each of n_heads={n_heads}; got {alibi.n_heads}")
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window must be None or at least 1; got {sliding_window}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be in [0, 1); got {dropout}")
        fused = ("qk_norm_rope",) if qk_norm and rope is not None else ()
        self.backends = plan(backend, ("flash_attention", *fused))  # packed or not
        self.dim, self.n_heads, self.n_kv_heads, self.head_dim = dim, n_heads, n_kv_heads, head_dim
        self.causal, self.sliding_window, self.dropout = causal, sliding_window, dropout
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.wq = torch.nn.Linear(dim, n_heads * head_dim, bias=bias, **factory)
        self.wk = torch.nn.Linear(dim, n_kv_heads * head_dim, bias=bias, **factory)
        self.wv = torch.nn.Linear(dim, n_kv_heads * head_dim, bias=bias, **factory)
        self.wo = torch.nn.Linear(n_heads * head_dim, dim, bias=bias if out_bias is None else out_bias, **factory)
        self.rope, self.alibi, self.norm_eps = rope, alibi, norm_eps
        self.q_norm = self.k_norm = None
        if qk_norm:
            norm: dict[str, Any] = {**factory, "round_before_weight": norm_round_before_weight, "backend": backend}
            self.q_norm, self.k_norm = (RMSNorm(head_dim, norm_eps, **norm) for _ in range(2))

    def forward(
        self,
        x: Tensor,
        positions: Tensor | int | None = None,
        *,
        cache: KeyValueStore | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        attn_mask: Tensor | AttentionMask | None = None,
        lengths: Tensor | None = None,
        return_lse: bool = False,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """x ``[B, T, dim]`` to ``[B, T, dim]``.

        Args:
            positions: of the tokens, as :class:`RotaryEmbedding` takes them; None continues the cache or starts at 0,
                in a packed batch at 0 in each sequence.
            cache: this layer's stored keys and values, which the new ones are appended to. Query t then sees all that
                was stored before, and the new keys up to its own.
            cu_seqlens: ``[N + 1]`` int32 or int64 of a packed batch: x is ``[1, total, dim]`` and holds N sequences one
                after the other, sequence n at the tokens ``cu_seqlens[n] .. cu_seqlens[n + 1] - 1``, which see no
                other's. Not together with a cache.
            max_seqlen: the longest of these sequences or any number above it; None is ``total``, which on a GPU
                launches empty programs where there are many sequences.
            attn_mask: what a query sees of what `causal` and the window let it see: bool, floating or an
                :class:`foundry_kernels.AttentionMask`, as of :func:`flash_attention`, for ``[B, H, T, S]``; S counts
                the keys in the cache too. Not together with `cu_seqlens`.
            lengths: ``[B]`` int32 or int64: no query of sequence b sees the keys at ``lengths[b]`` and behind it, of
                those in the cache and x's: padding at the end. (They are computed all the same.) Not together with
                `cu_seqlens`. With a bool mask or an AttentionMask both are combined tile by tile, which waits for a
                GPU; a floating one is copied to ``[B, h, t, S]``, with the padding at -inf, and keeps its gradient.
            return_lse, return_stats: also return what :func:`flash_attention` returns for them, ``[B, H, T]`` each.

        Returns:
            y, or ``(y, lse)``, ``(y, entropy, max_logit)``, ``(y, lse, entropy, max_logit)``.

        Raises:
            TypeError: cu_seqlens or lengths is no integer tensor, attn_mask of another kind.
            ValueError: x has another rank or width, a packed batch comes with more than one row, a cache, a mask or
                lengths, a mask or lengths have another shape or device, or the rotary embedding's, the cache's or the
                operations' own conditions.
        """
        self._check(x, cache, cu_seqlens, max_seqlen)
        if attn_mask is not None or lengths is not None:
            n_keys = x.shape[1] if cache is None else cache.length + x.shape[1]
            check_masks(attn_mask, lengths, cu_seqlens, (x.shape[0], self.n_heads, x.shape[1], n_keys), x, "x")
            if lengths is not None:
                attn_mask = hide_padding(attn_mask, lengths, n_keys)
        layers = layers_for(x, self.backends["flash_attention"])
        q, k, v = self._queries_keys_values(layers, x, positions, cache, cu_seqlens)
        out, *rows = self._attend(q, k, v, attn_mask, cu_seqlens, max_seqlen, return_lse, return_stats)
        # A view where the operation kept q's storage order, as it promises.
        y = layers.linear(out.transpose(1, 2).flatten(2), self.wo)
        return (y, *rows) if rows else y

    def _check(self, x: Tensor, cache: KeyValueStore | None, cu_seqlens: Tensor | None, max_seqlen: int | None) -> None:
        check_tensor("x", x)
        check_rank("x", x, 3, f"[B, T, {self.dim}]")
        if x.shape[-1] != self.dim:
            raise ValueError(f"x must have dim={self.dim} as its last dimension; got shape {tuple(x.shape)}")
        if cu_seqlens is not None:
            check_integer("cu_seqlens", cu_seqlens)
            if x.shape[0] != 1:
                raise ValueError(f"x must be [1, total, {self.dim}] with cu_seqlens; got shape {tuple(x.shape)}")
            if cache is not None:
                raise ValueError("cu_seqlens and cache exclude each other; got both")
        elif max_seqlen is not None:
            raise ValueError(f"max_seqlen needs cu_seqlens; got max_seqlen={max_seqlen} alone")

    def _queries_keys_values(
        self,
        layers: Layers,
        x: Tensor,
        positions: Tensor | int | None,
        cache: KeyValueStore | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of x, rotated, and the keys and values that they see: x's own behind those in the cache."""
        projections = (self.wq, self.wk, self.wv)
        packed = layers.together(x, *projections)
        if packed is not None:
            if positions is None and self.q_norm is None:
                found = layers.append(packed, cache, self.rope, self.n_heads, self.n_kv_heads, self.head_dim)
                if found is not None:
                    return found
            heads = packed.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            q, k, v = heads.split((self.n_heads, self.n_kv_heads, self.n_kv_heads), 1)
        else:
            # Heads are counted from what the projections give: under tensor parallelism a device has a part of them.
            q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in projections)
        if self.rope is not None:
            if positions is None and cache is not None:
                positions = cache.length
            elif positions is None and cu_seqlens is not None:
                positions = packed_positions(cu_seqlens, x.shape[1])
            q, k = self.rope(q, k, positions) if self.q_norm is None else self._norm_and_rotate(q, k, positions)
        elif self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | AttentionMask | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        return_lse: bool,
        return_stats: bool,
    ) -> tuple[Tensor, ...]:
        """The heads' results ``[B, H, T, D]``, and what is returned for each row ``[B, H, T]``."""
        window = None if self.sliding_window is None else (self.sliding_window - 1, self.sliding_window - 1)
        slopes = None if self.alibi is None else self.alibi.slopes
        options: dict[str, Any] = {
            "causal": self.causal, "window": window, "alibi_slopes": slopes,
            "dropout_p": self.dropout if self.training else 0.0,
            "return_lse": return_lse, "return_stats": return_stats, "backend": self.backends["flash_attention"],
        }  # fmt: skip
        if cu_seqlens is None:
            result = flash_attention(q, k, v, attn_mask=attn_mask, **options)
            return result if isinstance(result, tuple) else (result,)
        max_seqlen = q.shape[2] if max_seqlen is None else max_seqlen
        q, k, v = (t.squeeze(0).transpose(0, 1) for t in (q, k, v))
        result = flash_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
        out, *rows = result if isinstance(result, tuple) else (result,)
        return out.transpose(0, 1).unsqueeze(0), *(t.unsqueeze(0) for t in rows)

    def _norm_and_rotate(self, q: Tensor, k: Tensor, positions: Tensor | int | None) -> tuple[Tensor, Tensor]:
        rope, q_norm, k_norm = self.rope, self.q_norm, self.k_norm
        assert rope is not None
        assert q_norm is not None
        assert k_norm is not None
        cos, sin, positions = rope.rows(q.shape[2], positions)
        return qk_norm_rope(
            q, k, q_norm.weight, k_norm.weight, cos, sin, eps=self.norm_eps, positions=positions,
            round_before_weight=q_norm.round_before_weight, interleaved=rope.interleaved,
            backend=self.backends["qk_norm_rope"],
        )  # fmt: skip

    def extra_repr(self) -> str:
        extra = "" if self.sliding_window is None else f"sliding_window={self.sliding_window}, "
        extra += f"dropout={self.dropout}, " if self.dropout else ""
        return (
            f"{self.dim}, n_heads={self.n_heads}, n_kv_heads={self.n_kv_heads}, head_dim={self.head_dim}, "
            f"causal={self.causal}, {extra}backend={describe(self.backends)}"
        )
