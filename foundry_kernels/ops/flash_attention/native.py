"""Attention of the compiled extension: `csrc/torch/flash_attention.cpp` over `csrc/cpu/flash_attention_*.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.reference import _wanted


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bottom_right: bool,
    return_lse: bool,
    return_stats: bool,
) -> Tensor | tuple[Tensor, ...]:
    out, *rows = torch.ops.foundry_kernels.flash_attention.default(
        q, k, v, scale, left, right, softcap, alibi_slopes, sinks, bottom_right, return_lse, return_stats
    )
    return _wanted(out, rows, return_lse, return_stats)


def flash_attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int | None,
    right: int | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    bottom_right: bool,
    return_lse: bool,
    return_stats: bool,
) -> Tensor | tuple[Tensor, ...]:
    starts = (cu_seqlens_q, cu_seqlens_k)
    out, *rows = torch.ops.foundry_kernels.flash_attention_varlen.default(
        q, k, v, *starts, scale, left, right, softcap, alibi_slopes, sinks, bottom_right, return_lse, return_stats
    )
    return _wanted(out, rows, return_lse, return_stats)
