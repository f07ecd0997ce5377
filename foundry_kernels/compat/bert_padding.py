"""flash-attn's functions between a padded batch and packed sequences."""

from __future__ import annotations

from typing import SupportsIndex

import torch
from torch import Tensor

from foundry_kernels.compat.scalars import as_int
from foundry_kernels.core.checks import check_device, check_integer, check_shape, check_tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Packs the tokens of a padded batch, and returns them with the arguments of the varlen functions.

    Args:
        hidden_states: ``[B, S, ...]``.
        attention_mask: ``[B, S]``, bool or a number: not 0 for a token.
        unused_mask: ``[B, S]``, likewise, or None: tokens that are also packed, but not used.

    Returns:
        ``(packed [total, ...], indices [total] int64, cu_seqlens [B + 1] int32, max_seqlen, seqused [B] int32)``:
        `indices` are positions in the flattened batch, for :func:`pad_input`; `seqused` counts the tokens of
        `attention_mask` alone. Gradients flow to `hidden_states`.

    Raises:
        TypeError, ValueError: an argument is not a tensor, or its shape or device does not fit.

    A call reads the lengths, so it waits for a GPU.
    """
    check_tensor("hidden_states", hidden_states)
    if hidden_states.dim() < 2:
        raise ValueError(f"hidden_states must be [B, S, ...]; got shape {tuple(hidden_states.shape)}")
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None:
            check_tensor(name, mask)
            check_shape(name, mask, hidden_states.shape[:2], "one for each token of hidden_states")
            check_device(name, mask, "hidden_states", hidden_states)
    used = attention_mask != 0
    chosen = used if unused_mask is None else used | (unused_mask != 0)
    lengths = chosen.sum(-1, dtype=torch.int32)
    indices = chosen.flatten().nonzero().squeeze(1)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if lengths.numel() else 0
    # index_select, because its gradient is deterministic: it is written once for each token
    packed = hidden_states.flatten(0, 1).index_select(0, indices)
    return packed, indices, cu_seqlens, max_seqlen, used.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: SupportsIndex, seqlen: SupportsIndex) -> Tensor:
    """Unpacks tokens into a padded batch, with zeros at the padding.

    Args:
        hidden_states: ``[total, ...]``.
        indices: ``[total]`` int32 or int64, none twice: each token's position in the flattened batch, from
            :func:`unpad_input`.
        batch, seqlen: B and S.

    Returns:
        ``[B, S, ...]``. Gradients flow to `hidden_states`.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or its shape or device does not fit.
        IndexError: on the CPU, an index outside of the batch.
    """
    check_tensor("hidden_states", hidden_states)
    if hidden_states.dim() < 1:
        raise ValueError("hidden_states must be [total, ...]; got shape ()")
    check_integer("indices", indices, 1, "[total]")
    check_shape("indices", indices, hidden_states.shape[:1], "one for each token of hidden_states")
    check_device("indices", indices, "hidden_states", hidden_states)
    rows, width = as_int("batch", batch), as_int("seqlen", seqlen)
    out = hidden_states.new_zeros(rows * width, *hidden_states.shape[1:])
    return out.index_copy(0, indices.long(), hidden_states).unflatten(0, (rows, width))
