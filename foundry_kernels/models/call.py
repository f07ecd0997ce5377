"""The arguments of a model's call as one object, and what the blocks get of them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from foundry_kernels.models.cache import KVCache
from foundry_kernels.models.context import Context
from foundry_kernels.models.paged_cache import PagedBatch
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask


class Call(NamedTuple):
    """The arguments of :meth:`Transformer.forward` that say what the model reads; a cache in pages as its batch."""

    tokens: Tensor
    targets: Tensor | None
    attn_mask: Tensor | AttentionMask | None
    lengths: Tensor | None
    cu_seqlens: Tensor | None
    max_seqlen: int | None
    token_types: Tensor | None
    context: Tensor | Context | None
    context_lengths: Tensor | None
    cache: KVCache | PagedBatch | None
    last_only: bool
    ignore_index: int


class Positions(NamedTuple):
    """The positions of tokens that do not simply follow the cached ones: of packed sequences, or of parts of them.
    `cu_seqlens` and `max_seqlen` are those of :class:`foundry_kernels.nn.Attention`."""

    positions: Tensor
    cu_seqlens: Tensor | None
    max_seqlen: int | None
