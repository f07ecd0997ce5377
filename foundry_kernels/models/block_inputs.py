"""What the blocks of a model get besides the stream: a mask, positions and packed sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.paged_cache import PagedBatch
from foundry_kernels.models.validate import check_linear_layers
from foundry_kernels.nn._masks import add_bias, check_masks, hide_padding, packed_positions
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask

if TYPE_CHECKING:
    from foundry_kernels.models.transformer import Transformer


def block_inputs(
    model: Transformer, tokens: Tensor, cache: KVCache | PagedBatch | None, attn_mask: Tensor | AttentionMask | None,
    lengths: Tensor | None, cu_seqlens: Tensor | None, max_seqlen: int | None,
) -> tuple[Any, ...]:  # fmt: skip
    """The additional arguments of every block (see `TransformerBlock`); none in a plain call."""
    relative, shard = model.relative_bias, model.sequence_shard
    stored = cache.cache if isinstance(cache, PagedBatch) else cache
    if stored is not None:
        check_linear_layers(model.config, stored.linear_layers)
    if model.config.linear_layers:
        if attn_mask is not None:
            raise ValueError("attn_mask must be None: linear attention, which layer_types has, takes no mask")
        if lengths is not None and cache is not None:
            raise ValueError(
                "lengths and cache exclude each other with linear attention, whose state would take in the padding"
            )
    if isinstance(cache, PagedBatch):
        if attn_mask is not None or lengths is not None or relative is not None:
            raise ValueError("PagedKVCache does not support attn_mask, lengths or relative positions")
        return ()  # the cache has the positions
    if shard is not None:
        return None, *shard.seen(tokens, cu_seqlens), max_seqlen
    if relative is not None and cu_seqlens is not None:
        raise ValueError("cu_seqlens does not support relative positions")
    positions = None
    if attn_mask is not None or lengths is not None or relative is not None:
        batch, count = tokens.shape
        keys = count if cache is None else cache.length + count
        weight = model.tok_embeddings.weight
        check_masks(attn_mask, lengths, cu_seqlens, (batch, model.config.n_heads, count, keys), weight, "the model")
        if relative is not None:
            attn_mask = add_bias(relative(count, keys), attn_mask)
        if lengths is not None:
            attn_mask = hide_padding(attn_mask, lengths, keys)
    elif cu_seqlens is None:
        return ()
    else:
        positions = packed_positions(cu_seqlens, tokens.shape[1])
    return attn_mask, positions, cu_seqlens, max_seqlen
