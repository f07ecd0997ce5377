"""Nested tensors, whose sequences have a length each, as packed tokens and back."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor


class Packed(NamedTuple):
    """Sequences one after the other, as :func:`foundry_kernels.flash_attention_varlen` takes them."""

    tokens: Tensor  # [total, E]
    cu_seqlens: Tensor  # [B + 1]
    max_seqlen: int


def pack(name: str, x: Tensor) -> Packed:
    """The sequences of a nested tensor ``[B, *, E]`` of either layout; `name` is that of x in errors."""
    if x.dim() != 3:
        raise ValueError(f"{name} must be a nested tensor [B, *, E]; got one of {x.dim()} dimensions")
    if x.layout == torch.jagged:
        x = x if x.is_contiguous() else x.contiguous()
        offsets = x.offsets()  # type: ignore[attr-defined]
        lengths = offsets.diff()
        return Packed(x.values(), offsets, int(lengths.max()) if lengths.numel() else 0)
    sequences = x.unbind()
    sizes = [len(sequence) for sequence in sequences]
    cu_seqlens = torch.tensor([0, *accumulate(sizes)], device=x.device)
    return Packed(torch.cat(sequences), cu_seqlens, max(sizes, default=0))


def pack_padded(x: Tensor, lengths: Tensor, seen: Tensor) -> Packed:
    """The tokens of x ``[B, T, E]`` that are no padding: `seen` ``[B, T]``, the first `lengths` ``[B]`` of each row."""
    return Packed(x[seen], torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), int(lengths.max()))


def pad_packed(packed: Packed) -> tuple[Tensor, Tensor]:
    """``[B, T, E]`` with zeros for padding, T being the longest length, and which tokens are none of it, ``[B, T]``."""
    tokens, cu_seqlens, max_seqlen = packed
    seen = torch.arange(max_seqlen, device=tokens.device) < cu_seqlens.diff()[:, None]
    return tokens.new_zeros(*seen.shape, tokens.shape[1]).index_put((seen,), tokens), seen


def nest_like(tokens: Tensor, packed: Packed, x: Tensor) -> Tensor:
    """Packed tokens ``[total, E]`` as a nested tensor with the sequences, and the layout, of x."""
    if x.layout == torch.jagged:
        return torch.nested.nested_tensor_from_jagged(tokens, packed.cu_seqlens, max_seqlen=packed.max_seqlen)
    sizes = packed.cu_seqlens.diff().tolist()
    return torch.nested.as_nested_tensor(list(tokens.split(sizes)))
