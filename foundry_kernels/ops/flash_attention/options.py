"""The options of attention: what a caller gives, and the same checked, which every backend reads.

A new option needs a field in both classes here, a check in `checks.py` and support in the kernels.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from foundry_kernels.core.options import Options
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.score_program.trace import ScoreFunction


class AttentionArguments(NamedTuple):
    """The keyword arguments of both public functions except `backend`, in the order in which the direct call reads
    them (csrc/torch/flash_attention_options.h)."""

    causal: bool = False
    scale: float | None = None
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    sinks: Tensor | None = None
    attn_mask: Tensor | AttentionMask | None = None
    dropout_p: float = 0.0
    dropout_seed: Tensor | int | None = None
    score_mod: ScoreFunction | None = None
    align: str = "bottom_right"
    deterministic: bool = True
    batch_invariant: bool = False
    return_lse: bool = False
    return_stats: bool = False


class AttentionOptions(Options, not_in_schema=("return_lse", "return_stats")):
    cu_seqlens_q: Tensor | None  # None: dense, q is [B, H, T, D]; else packed, q is [total, H, D]
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int
    max_seqlen_k: int
    block_table: Tensor | None  # [B, max_blocks]: k and v are pages [num_blocks, page_block_size, Hk, D], see `pages`
    seqused_k: Tensor | None  # [B], where there is a block_table, in place of cu_seqlens_k
    leftpad_k: Tensor | None
    scale: float
    window_left: int | None
    window_right: int | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    attn_mask: Tensor | None  # [b, h, t, s], each 1 or that of the scores; bool, or floating to be added to them
    mask_tiles: Tensor | None  # see `attention_mask`
    mask_bits: Tensor | None
    dropout_p: float | None  # None for no dropout, see `dropout`
    dropout_seed: Tensor | None
    dropout_heads: Tensor | None  # [B, H]: batch << 32 | head of each head in the whole of which this is a shard
    score_mod: tuple[int, ...] | None  # the encoded program, see `score_program`
    score_tensors: tuple[Tensor, ...] | None  # what it reads, one for each slot of the program; None if nothing
    bottom_right: bool
    deterministic: bool
    batch_invariant: bool
    return_lse: bool = False
    return_stats: bool = False

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def needs(self) -> tuple[str, ...]:
        """The options that the call sets, of those that not every backend supports."""
        if self.block_table is None and self.score_mod is None:
            return ()
        return tuple([name for name in ("block_table", "score_mod") if getattr(self, name) is not None])

    def select(self, out: Tensor, lse: Tensor, entropy: Tensor, max_logit: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The requested results."""
        if self.return_lse:
            return (out, lse, entropy, max_logit) if self.return_stats else (out, lse)
        return (out, entropy, max_logit) if self.return_stats else out


#: The options of `AttentionOptions.needs` that a backend does not support, by device: "auto" passes over the backend in
#: calls that set one, and by name the backend refuses them.
LACKS: dict[str, dict[str, tuple[str, ...]]] = {
    "native": {"cuda": ("block_table", "score_mod")},
}
