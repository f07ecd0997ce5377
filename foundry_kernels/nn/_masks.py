"""What limits the keys that queries see besides `causal` and a window: a mask, the lengths of padded rows, packed
sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_device, check_integer, check_shape
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.checks import Scores, check_mask


def check_masks(
    attn_mask: Tensor | AttentionMask | None,
    lengths: Tensor | None,
    cu_seqlens: Tensor | None,
    shape: tuple[int, int, int, int],
    x: Tensor,
    name: str,
    name_of_lengths: str = "lengths",
) -> None:
    """Checks both for scores of this shape ``[B, H, T, S]``. x: a tensor of the model's device and dtype, called `name`
    in errors."""
    if cu_seqlens is not None:
        given = "lengths" if attn_mask is None else "attn_mask"
        raise ValueError(f"{given} and cu_seqlens exclude each other: packed sequences do not support it; got both")
    if attn_mask is not None:
        check_mask(attn_mask, Scores(*shape, x.dtype, x.device, name))
    if lengths is not None:
        check_integer(name_of_lengths, lengths)
        check_shape(name_of_lengths, lengths, shape[:1], "one for each sequence")
        check_device(name_of_lengths, lengths, name, x)


def add_bias(bias: Tensor, attn_mask: Tensor | AttentionMask | None) -> Tensor:
    """Combines a bias ``[1, H, T, S]`` with `attn_mask`."""
    if attn_mask is None:
        return bias
    seen = attn_mask.dense(*bias.shape[2:]) if isinstance(attn_mask, AttentionMask) else attn_mask
    return bias.masked_fill(~seen, -torch.inf) if seen.dtype == torch.bool else bias + seen


def hide_padding(attn_mask: Tensor | AttentionMask | None, lengths: Tensor, n_keys: int) -> Tensor | AttentionMask:
    """Combines `attn_mask` with the padding mask: sequence b sees only the keys ``j < lengths[b]``."""
    padding = AttentionMask.prefix(lengths)
    if attn_mask is None:
        return padding
    if isinstance(attn_mask, AttentionMask):
        return attn_mask & padding
    if attn_mask.dtype == torch.bool:
        return AttentionMask(attn_mask) & padding
    hidden = torch.arange(n_keys, device=lengths.device) >= lengths[:, None, None, None]
    return attn_mask.masked_fill(hidden, -torch.inf)


def packed_positions(cu_seqlens: Tensor, total: int) -> Tensor:
    """The position of each packed token in its sequence, computed without waiting for a GPU."""
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    return token - cu_seqlens[sequence]
