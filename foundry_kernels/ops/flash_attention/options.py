"""The options of one call of attention: made and checked in the public functions, read by every backend.

A new option needs a field here, a check in `checks.py` and support in the kernels. Backends refuse calls that set an
option which they do not support.
"""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.core.options import Options


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
    bottom_right: bool
    deterministic: bool
    batch_invariant: bool
    return_lse: bool = False
    return_stats: bool = False

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def select(self, out: Tensor, lse: Tensor, entropy: Tensor, max_logit: Tensor) -> Tensor | tuple[Tensor, ...]:
        """The requested results."""
        if self.return_lse:
            return (out, lse, entropy, max_logit) if self.return_stats else (out, lse)
        return (out, entropy, max_logit) if self.return_stats else out


#: The options that all backends support. A backend that supports one more passes ``(*SUPPORTED_BY_ALL, "its name")`` to
#: `refuse_others`.
SUPPORTED_BY_ALL = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "block_table", "seqused_k", "leftpad_k",
    "scale", "window_left", "window_right", "softcap",
    "alibi_slopes", "sinks", "attn_mask", "mask_tiles", "mask_bits", "dropout_p", "dropout_seed", "dropout_heads",
    "bottom_right", "deterministic", "batch_invariant", "return_lse", "return_stats",
)  # fmt: skip
