"""How many tokens have logits at a time where the caller gives no `chunk_size`: as for linear_cross_entropy, with two
logits for each of its own and without blocks of classes, as a divergence needs the normalizers of both sides."""

from __future__ import annotations

from torch import Tensor

from foundry_kernels.ops.linear_cross_entropy import sizes
from foundry_kernels.ops.linear_cross_entropy.calls import Needs
from foundry_kernels.ops.linear_cross_entropy.options import TILES, LinearLossOptions


def on_cpu(hidden: Tensor, weight: Tensor, options: LinearLossOptions, needs: Needs) -> int | None:
    return _without_tiles(sizes.on_cpu(hidden, weight, options, needs))


def on_gpu(hidden: Tensor, weight: Tensor, options: LinearLossOptions, needs: Needs) -> int | None:
    return _without_tiles(sizes.on_gpu(hidden, weight, options, needs, logits=2))


def _without_tiles(chunk_size: int | None) -> int | None:
    return None if chunk_size == TILES else chunk_size
