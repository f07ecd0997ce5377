"""Small inputs of attention, and its reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.options import AttentionOptions
from foundry_kernels.testing import lay_out

B, H, HK, T, S, D, DV = 2, 4, 2, 5, 7, 6, 3


def inputs(
    t: int = T,
    s: int = S,
    *,
    b: int = B,
    heads: tuple[int, int] = (H, HK),
    dtype: torch.dtype = torch.float64,
    layout: str = "contiguous",
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(t * 100 + s)
    shapes = ((b, heads[0], t, D), (b, heads[1], s, D), (b, heads[1], s, DV))
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)
    q, k, v = (lay_out(x, layout).requires_grad_() for x in drawn)
    return q, k, v


def plain_options(t: int, s: int, scale: float = 0.1, **given: Any) -> AttentionOptions:
    """The options for T queries and S keys, off except for the given ones."""
    fields: dict[str, Any] = dict.fromkeys(AttentionOptions._fields)
    fields |= {"max_seqlen_q": t, "max_seqlen_k": s, "scale": scale, "bottom_right": True, "deterministic": True}
    fields["batch_invariant"] = False
    return AttentionOptions(**(fields | {"return_lse": False, "return_stats": False} | given))


def attend(*args: Any, **options: Any) -> Any:
    return flash_attention(*args, **options, backend="reference")


def attend_varlen(*args: Any, **options: Any) -> Any:
    return flash_attention_varlen(*args, **options, backend="reference")
