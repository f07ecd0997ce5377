"""Attention of the compiled extension: `csrc/torch/flash_attention.cpp` over `csrc/cpu/flash_attention_*.cpp` and, on a
GPU, `csrc/cuda/flash_attention_*.cu`."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from foundry_kernels.core.registry import BackendUnavailable
from foundry_kernels.ops.flash_attention.options import SUPPORTED_BY_ALL, AttentionOptions

_ATTEND = torch.ops.foundry_kernels.flash_attention.default

#: mma.sync of bfloat16 and cp.async, which the kernels are made of.
OLDEST = (8, 0)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor | tuple[Tensor, ...]:
    options.refuse_others(SUPPORTED_BY_ALL, "flash_attention", "native")
    if q.is_cuda:
        _refuse_older(q.device.index)
    # The operator takes all options in the order of the fields, and returns an empty tensor for what is not wanted.
    return options.select(*_ATTEND(q, k, v, *options))


flash_attention_varlen = flash_attention


@cache
def _refuse_older(device: int) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST:
        raise BackendUnavailable(
            f"flash_attention: backend 'native' is for GPUs of compute capability {OLDEST[0]}.{OLDEST[1]} and newer; "
            f"{torch.cuda.get_device_name(device)} has {capability[0]}.{capability[1]}. Use backend 'reference'"
        )
