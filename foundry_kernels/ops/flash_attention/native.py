"""Attention of the compiled extension: `csrc/torch/flash_attention.cpp` over `csrc/cpu/flash_attention_*.cpp` and, on a
GPU, `csrc/cuda/flash_attention_*.cu` and, of compute capability 9.0, `csrc/cuda/hopper/attention_*.cu`."""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels._triton.devices import too_old
from foundry_kernels.core.registry import BackendUnavailable
from foundry_kernels.ops.flash_attention.options import AttentionOptions

_ATTEND = torch.ops.foundry_kernels.flash_attention.default


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | tuple[Tensor, ...]:
    options.refuse_others(AttentionOptions._fields, "flash_attention", "native")
    ask = q.is_cuda and not torch.compiler.is_compiling()
    if ask and (reason := too_old(q.device.index)) is not None:  # mma.sync of bfloat16, cp.async
        raise BackendUnavailable(f"flash_attention: backend 'native': {reason}. Use backend 'reference'")
    # The operator takes all options in the order of the fields, and returns an empty tensor for each result that is not
    # requested.
    return options.select(*_ATTEND(q, k, v, *options))


flash_attention_varlen = flash_attention
