"""The two passes of attention without autograd: for those who keep what the backward pass needs themselves.

They keep lse in float32. Between their own passes the kernels have it in float64 for float32 inputs: gradients of
float32 are less exact by this way, as exact as PyTorch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention import FLASH_ATTENTION
from foundry_kernels.ops.flash_attention.options import AttentionOptions


def backend_of(q: Tensor) -> str | None:
    """The backend with kernels for both passes that "auto" takes for such queries, or None: the reference has none, and
    of float64, which only interpreted kernels take, lse would have to stay float64."""
    if q.dtype == torch.float64:
        return None
    device = q.device.type
    for name in FLASH_ATTENTION.order(device, q.dtype):
        if FLASH_ATTENTION.why_not(name, device, q.dtype) is None:
            return None if name == "reference" else name
    return None


@torch.no_grad()
def forward(backend: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out, lse float32) of the arguments of the operators: dense with heads first, or packed."""
    if backend == "triton":
        from foundry_kernels.ops.flash_attention.triton import flash_attention_fwd

        out, lse, *_ = flash_attention_fwd(q, k, v, options, True, False)
    else:
        operator = torch.ops.foundry_kernels.flash_attention_fwd.default
        out, lse, *_ = operator(q, k, v, *options.operator_args(), True, False)
    return out, lse.to(torch.float32)


@torch.no_grad()
def backward(
    backend: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv), from the results of `forward` with the same options."""
    need = (True, True, True, False, False)
    if backend == "triton":
        from foundry_kernels.ops.flash_attention.triton import flash_attention_bwd

        lse = lse.to(torch.float64 if q.dtype == torch.float32 else torch.float32)
        dq, dk, dv, *_ = flash_attention_bwd(dout, None, q, k, v, out, lse, options, *need)
    else:
        operator = torch.ops.foundry_kernels.flash_attention_bwd.default
        lse = lse.to(torch.float64)
        dq, dk, dv, *_ = operator(dout, None, q, k, v, out, lse, *options.operator_args(), *need)
    return dq, dk, dv
