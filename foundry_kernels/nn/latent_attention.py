r"""Multi-head latent attention: keys and values of all heads are made of one narrow vector per token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_int
from foundry_kernels.nn._attention_checks import check_options
from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._linear_layers import Layers
from foundry_kernels.nn._paged import PagedKeyValues
from foundry_kernels.nn.norm import RMSNorm
from foundry_kernels.nn.positions import AlibiSlopes
from foundry_kernels.nn.rotary import RotaryEmbedding
from foundry_kernels.nn.self_attention import KeyValueStore, SelfAttention
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.score_program.trace import ScoreFunction


class LatentAttention(SelfAttention):
    r"""Multi-head latent attention (MLA); its parameters have the names and shapes of DeepSeek-V3 in transformers.

    For an input x ``[B, T, dim]``,

    .. math:: c, r &= W^{kv}_a x, \quad k^{nope}, v = W^{kv}_b \, \mathrm{rms\_norm}(c), \quad
         k = [k^{nope}, \mathrm{rope}(r)] \\
       q &= [q^{nope}, \mathrm{rope}(q^{rope})] \ \text{of}\ W^q_b \, \mathrm{rms\_norm}(W^q_a x) \ \text{or}\ W^q x \\
       y &= W_o \, \mathrm{flash\_attention}(q, k, v)

    where c is the latent vector of a token, and r the part of its key that all heads share. Without `rope` nothing is
    rotated (Kimi Linear). Queries and keys are ``qk_nope_head_dim + qk_rope_head_dim`` wide, values `v_head_dim`, and a
    cache stores both for every head.

    Args:
        dim: width of the input and the output.
        n_heads: heads H.
        kv_lora_rank: width of c.
        q_lora_rank: width of the queries' latent vector, or None for queries from x directly.
        qk_nope_head_dim: the dimensions of a head's query and key that are not rotated.
        qk_rope_head_dim: those that may be rotated, and whose keys all heads share.
        v_head_dim: width of a head's value.
        rope: the rotary embedding of `qk_rope_head_dim` dimensions, which layers may share, or None for no rotation.
        alibi, causal, sliding_window, dropout: as of :class:`Attention`.
        bias: whether `q_a_proj` and `kv_a_proj_with_mqa` have a bias.
        out_bias: whether `o_proj` has one; None is `bias`.
        scale: factor on the scores; None is ``(qk_nope_head_dim + qk_rope_head_dim) ** -0.5``.
        norm_eps, norm_round_before_weight: options of the two norms, as in :class:`RMSNorm`.
        backend: a backend's name, or a mapping of operations to names. The rotary embedding has its own backend.

    Attributes:
        q_proj: of the queries; with `q_lora_rank` q_a_proj, q_a_layernorm and q_b_proj.
        kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj: of the keys and values.
        o_proj: of the result.

    Raises:
        TypeError: a size is not an int, or `causal` is not a bool.
        ValueError: a size is below 1, `rope` has other dimensions, or an error of :class:`Attention`.

    DeepSeek-AI, "DeepSeek-V2", 2024, arXiv:2405.04434.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        *,
        qk_nope_head_dim: int = 128,
        qk_rope_head_dim: int = 64,
        v_head_dim: int = 128,
        rope: RotaryEmbedding | None = None,
        alibi: AlibiSlopes | None = None,
        causal: bool = True,
        sliding_window: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        scale: float | None = None,
        norm_eps: float | None = 1e-6,
        norm_round_before_weight: bool = False,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "n_heads": n_heads, "kv_lora_rank": kv_lora_rank, "v_head_dim": v_head_dim}
        sizes |= {"qk_nope_head_dim": qk_nope_head_dim, "qk_rope_head_dim": qk_rope_head_dim}
        for name, value in (sizes if q_lora_rank is None else {**sizes, "q_lora_rank": q_lora_rank}).items():
            check_int(name, value, 1)
        if rope is not None and rope.dim != qk_rope_head_dim:
            raise ValueError(f"rope must rotate qk_rope_head_dim={qk_rope_head_dim} dimensions; got {rope.dim}")
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        check_options(n_heads, head_dim, rope, alibi, causal, sliding_window, scale, "head", dropout)
        self.backends = plan(backend, ("flash_attention", "rms_norm"))
        self.dim, self.n_heads, self.n_kv_heads, self.head_dim = dim, n_heads, n_heads, head_dim
        self.kv_lora_rank, self.q_lora_rank, self.v_head_dim = kv_lora_rank, q_lora_rank, v_head_dim
        self.qk_nope_head_dim, self.qk_rope_head_dim = qk_nope_head_dim, qk_rope_head_dim
        self.causal, self.sliding_window = causal, None if sliding_window == -1 else sliding_window
        self.scale, self.dropout, self.rope, self.alibi = scale, dropout, rope, alibi
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        norm = {**factory, "round_before_weight": norm_round_before_weight, "backend": self.backends}
        if q_lora_rank is None:
            self.q_proj = torch.nn.Linear(dim, n_heads * head_dim, bias=False, **factory)
        else:
            self.q_a_proj = torch.nn.Linear(dim, q_lora_rank, bias=bias, **factory)
            self.q_a_layernorm = RMSNorm(q_lora_rank, norm_eps, **norm)
            self.q_b_proj = torch.nn.Linear(q_lora_rank, n_heads * head_dim, bias=False, **factory)
        self.kv_a_proj_with_mqa = torch.nn.Linear(dim, kv_lora_rank + qk_rope_head_dim, bias=bias, **factory)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, norm_eps, **norm)
        self.kv_b_proj = torch.nn.Linear(kv_lora_rank, n_heads * (qk_nope_head_dim + v_head_dim), bias=False, **factory)
        out_bias = bias if out_bias is None else out_bias
        self.o_proj = torch.nn.Linear(n_heads * v_head_dim, dim, bias=out_bias, **factory)

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
        score_mod: ScoreFunction | None = None,
        return_lse: bool = False,
        return_stats: bool = False,
    ) -> Tensor | tuple[Tensor, ...]:
        """x ``[B, T, dim]`` to ``[B, T, dim]``. Arguments, results and errors are those of :meth:`Attention.forward`
        without a context."""
        wanted = {"score_mod": score_mod, "return_lse": return_lse, "return_stats": return_stats}
        return self._attend_to_itself(x, positions, cache, cu_seqlens, max_seqlen, attn_mask, lengths, wanted)

    def _queries_keys_values(
        self,
        layers: Layers,
        x: Tensor,
        positions: Tensor | int | None,
        cache: KeyValueStore | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        first = self.q_proj if self.q_lora_rank is None else self.q_a_proj
        if (together := layers.together(x, first, self.kv_a_proj_with_mqa)) is None:
            q, latent = layers.each(x, first, self.kv_a_proj_with_mqa)
        else:
            q, latent = together.split((first.out_features, self.kv_a_proj_with_mqa.out_features), -1)
        if self.q_lora_rank is not None:
            q = layers.linear(self.q_a_layernorm(q), self.q_b_proj)
        latent, shared = latent.split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        of_heads = layers.linear(self.kv_a_layernorm(latent), self.kv_b_proj).unflatten(-1, (self.n_heads, -1))
        k, v = of_heads.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        q, shared = q.unflatten(-1, (self.n_heads, -1)), shared.unsqueeze(2)
        if self.rope is not None:
            place = self._place(self.rope, x.shape[1], positions, cache, cu_seqlens, max_seqlen)
            kept, turned = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
            turned, shared = (
                t.transpose(1, 2) for t in self.rope(turned.transpose(1, 2), shared.transpose(1, 2), *place)
            )
            q = torch.cat((kept, turned), -1)
        k = torch.cat((k, shared.expand(-1, -1, self.n_heads, -1)), -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        if cache is not None:
            k, v = cache.append(k, v)
        return q, k, v

    @property
    def output_projection(self) -> torch.nn.Linear:
        return self.o_proj

    def extra_repr(self) -> str:
        extra = "" if self.sliding_window is None else f"sliding_window={self.sliding_window}, "
        extra += f"dropout={self.dropout}, " if self.dropout else ""
        extra += f"scale={self.scale}, " if self.scale is not None else ""
        return (
            f"{self.dim}, n_heads={self.n_heads}, kv_lora_rank={self.kv_lora_rank}, q_lora_rank={self.q_lora_rank}, "
            f"qk_nope_head_dim={self.qk_nope_head_dim}, qk_rope_head_dim={self.qk_rope_head_dim}, "
            f"v_head_dim={self.v_head_dim}, causal={self.causal}, {extra}backend={describe(self.backends)}"
        )
