"""Attention of the compiled extension: `csrc/torch/flash_attention.cpp` over `csrc/cpu/flash_attention_*.cpp`."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.options import AttentionOptions, refuse_others

#: The options that this backend serves, in the order of the fields.
SERVED = (
    "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "scale", "window_left", "window_right", "softcap",
    "alibi_slopes", "sinks", "bottom_right", "deterministic", "return_lse", "return_stats",
)  # fmt: skip

_ATTEND = torch.ops.foundry_kernels.flash_attention.default


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | tuple[Tensor, ...]:
    refuse_others(options, SERVED, "native")
    # The operator takes all options in the order of the fields, and returns an empty tensor for what is not wanted.
    return options.select(*_ATTEND(q, k, v, *options))


flash_attention_varlen = flash_attention
