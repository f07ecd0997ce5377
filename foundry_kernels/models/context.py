"""The keys and values of a context in every layer, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foundry_kernels.nn import ContextKeyValues
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask


@dataclass(frozen=True)
class Context:
    """The result of :meth:`Transformer.read_context`, for any number of calls of the model.

    Attributes:
        layers: keys and values ``[B, Hk, S, D]`` of each layer.
        mask: the mask of the context; None means that all of it is visible.
    """

    layers: Sequence[ContextKeyValues | Tensor]
    mask: AttentionMask | None = None
