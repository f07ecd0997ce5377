"""Chunks through the extension's cross-entropy, on the CPU; or in the backward pass blocks of the vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.linear_cross_entropy import chunks, vocabulary_blocks
from foundry_kernels.ops.linear_cross_entropy.operators import Strategy, make_backend

_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")
_OPS = torch.ops.foundry_kernels


def _define(schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, function, "CPU")
    torch.library.register_fake(f"foundry_kernels::{name}", fake, lib=_LIBRARY)
    return getattr(_OPS, name).default


_FAST_PRODUCTS = chunks.fast_products(torch.bfloat16)  # looked up here, where no compiler traces it


def _prefers_tiles(hidden: Tensor, weight: Tensor, learns: bool) -> bool:
    """They spare the float32 sum of a bfloat16 weight's gradient, in the same time (docs/performance.md)."""
    return learns and hidden.dtype == torch.bfloat16 and _FAST_PRODUCTS


linear_cross_entropy = make_backend(
    "",
    _define,
    Strategy(
        chunks.Kernels(_OPS.cross_entropy_fwd.default, _OPS.cross_entropy_bwd.default, cpu=True),
        tiles_forward=None,
        tiles_backward=vocabulary_blocks.backward,
        prefers_tiles=_prefers_tiles,
    ),
)
