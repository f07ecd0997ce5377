"""Two paths: chunks of tokens through Triton's cross-entropy, and tiles whose logits are never written at all."""

from __future__ import annotations

import torch
from torch import Tensor

import foundry_kernels.ops.cross_entropy.triton  # noqa: F401  # whose operators these are
from foundry_kernels._triton.operators import define
from foundry_kernels.ops.linear_cross_entropy import chunks
from foundry_kernels.ops.linear_cross_entropy.operators import Strategy, make_backend
from foundry_kernels.ops.linear_cross_entropy.options import TILES
from foundry_kernels.ops.linear_cross_entropy.triton import tiles

_OPS = torch.ops.foundry_kernels
#: Bytes that chunks may take beyond the gradients before tiles are chosen.
CHUNKS_MAY_TAKE = 1 << 30


def chunks_take(n_tokens: int, shape: tuple[int, ...], dtype: torch.dtype, learns: bool) -> int:
    """Bytes of a chunk's logits and their gradient, and of the float32 sum of a 16-bit weight's gradient."""
    n_classes, width = shape
    logits = chunks.default_size(n_tokens, dtype.itemsize) * n_classes * dtype.itemsize
    return 2 * logits + (4 * n_classes * width if learns and dtype.itemsize == 2 else 0)


def _chunk_size(hidden: Tensor, weight: Tensor, learns: bool, reduces: bool) -> int | None:
    n_tokens = hidden.numel() // hidden.shape[-1]
    return TILES if chunks_take(n_tokens, weight.shape, hidden.dtype, learns) > CHUNKS_MAY_TAKE else None


linear_cross_entropy = make_backend(
    "triton_",
    define,
    Strategy(
        chunks.Kernels(_OPS.triton_cross_entropy_fwd.default, _OPS.triton_cross_entropy_bwd.default, cpu=False),
        tiles_forward=tiles.forward,
        tiles_backward=tiles.backward,
        chunk_size=_chunk_size,
    ),
)
