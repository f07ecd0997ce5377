"""A context that a model attends to: the keys and values of every layer, computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from foundry_kernels.nn import ContextKeyValues
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask


@dataclass(frozen=True)
class Context:
    """What :meth:`Transformer.read_context` has read of a context, for any number of calls of that model.

    Attributes:
        layers: keys and values ``[B, Hk, S, D]`` of each layer.
        mask: what of the context is seen; None is all.
    """

    layers: Sequence[ContextKeyValues | Tensor]
    mask: AttentionMask | None = None
