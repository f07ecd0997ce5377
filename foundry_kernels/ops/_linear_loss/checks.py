"""Checks that the public functions share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core import invariance
from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.checks import (
    check_bool,
    check_device,
    check_dtype,
    check_float,
    check_int,
    check_number,
    check_shape,
)
from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.ops._linear_loss.problem import TILES


def under_autocast(hidden: Tensor, *others: Any) -> tuple[Any, ...]:
    """The tensors of linear layers as such a layer takes them; what is no tensor as it is."""
    check_float("hidden", hidden)
    if (low := autocast_dtype(hidden)) is None:
        return hidden, *others
    return hidden.to(low), *[x.to(low) if isinstance(x, Tensor) else x for x in others]


def check_linear(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, logit_scale: float, chunk_size: int | str | None
) -> None:
    check_float("weight", weight)
    if hidden.dim() == 0 or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must have a last dimension of at least 1; got shape {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ValueError(f"weight must be [V, D] with V at least 1; got shape {tuple(weight.shape)}")
    check_shape("weight", weight, (weight.shape[0], hidden.shape[-1]), "the last dimension is hidden's")
    check_dtype("weight", weight, "hidden", hidden)
    check_device("weight", weight, "hidden", hidden)
    if bias is not None:
        check_float("bias", bias)
        check_shape("bias", bias, weight.shape[:1], "a value for each class")
        check_dtype("bias", bias, "hidden", hidden)
        check_device("bias", bias, "hidden", hidden)
    check_number("logit_scale", logit_scale)
    if chunk_size is not None and chunk_size != "tiles":
        check_int("chunk_size", chunk_size, minimum=1)


def check_pair(hidden: Tensor, weight: Tensor, low: Tensor | None, up: Tensor | None) -> None:
    if (low is None) != (up is None):
        raise ValueError("low and up must be given together, or neither")
    if low is None or up is None:
        return
    for name, x in (("low", low), ("up", up)):
        check_float(name, x)
        if x.dtype not in (hidden.dtype, torch.float32):
            raise ValueError(f"{name} must have hidden's dtype, {hidden.dtype}, or float32; got {x.dtype}")
        check_device(name, x, "hidden", hidden)
    if low.dim() != hidden.dim() or low.shape[:-1] != hidden.shape[:-1] or low.shape[-1] == 0:
        raise ValueError(
            f"low must be {[*hidden.shape[:-1], 'r']} with r at least 1, as hidden has the other dimensions; got shape "
            f"{tuple(low.shape)}"
        )
    check_shape("up", up, (weight.shape[0], low.shape[-1]), "a row for each class, as wide as low")


def strategy(chunk_size: int | str | None, batch_invariant: bool) -> tuple[Any, bool]:
    """The options `chunk_size` and `batch_invariant` of a checked call."""
    check_bool("batch_invariant", batch_invariant)
    if (batch_invariant or invariance.on) and chunk_size == "tiles":
        raise ValueError("chunk_size must be a number of tokens or None where batch_invariant is on; got 'tiles'")
    return TILES if chunk_size == "tiles" else chunk_size, batch_invariant or invariance.on


def is_vocab_sharded(weight: Any) -> bool:
    """Whether the weight is a DTensor that is sharded by its classes along one dimension of the mesh."""
    if not is_dtensor(weight):
        return False
    from foundry_kernels.ops._linear_loss.vocab_parallel import vocabulary_dim

    return vocabulary_dim(weight) is not None


def check_vocab_sharded(chunk_size: int | str | None, **tensors: Tensor | None) -> None:
    """Checks a call with sharded classes."""
    for name, x in tensors.items():
        if x is not None and not is_dtensor(x):
            raise ValueError(f"{name} must be a DTensor if weight is vocab-sharded; got a plain tensor")
    if chunk_size == "tiles":
        raise ValueError("chunk_size must be a number of tokens or None if weight is vocab-sharded; got 'tiles'")
