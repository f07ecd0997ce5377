"""Two ways: chunks of tokens through Triton's cross-entropy, and tiles whose logits are never written at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import foundry_kernels.ops.cross_entropy.triton  # noqa: F401  # whose operators these are
from foundry_kernels._triton import define
from foundry_kernels.ops.linear_cross_entropy import chunks
from foundry_kernels.ops.linear_cross_entropy.triton import tiles

_OPS = torch.ops.foundry_kernels
_either = chunks.make(
    "triton_",
    define,
    _OPS.triton_cross_entropy_fwd.default,
    _OPS.triton_cross_entropy_bwd.default,
    cpu=False,
    tiles=(tiles.forward, tiles.backward),
)
#: Bytes that chunks may take beyond the gradients before tiles are chosen.
CHUNKS_MAY_TAKE = 1 << 30


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
    logit_scale: float, chunk_size: int | str | None, return_lse: bool, return_z_loss: bool,
) -> tuple[Any, ...]:  # fmt: skip
    learns = torch.is_grad_enabled() and weight.requires_grad
    if chunk_size is None and chunks_take(target.numel(), weight.shape, hidden.dtype, learns) > CHUNKS_MAY_TAKE:
        chunk_size = "tiles"
    return _either(
        hidden, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, z_loss, softcap,
        logit_scale, chunk_size, return_lse, return_z_loss,
    )  # fmt: skip


def chunks_take(n_tokens: int, shape: tuple[int, ...], dtype: torch.dtype, learns: bool) -> int:
    """Bytes of a chunk's logits and their gradient, and of the float32 sum of a 16-bit weight's gradient."""
    n_classes, width = shape
    logits = chunks.default_size(n_tokens, dtype.itemsize) * n_classes * dtype.itemsize
    return 2 * logits + (4 * n_classes * width if learns and dtype.itemsize == 2 else 0)
