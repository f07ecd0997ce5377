"""The forward and the backward pass of attention without autograd, for callers that store the inputs of the backward
pass themselves or compute attention in parts (`foundry_kernels.distributed.ring`).

Between the passes kernels store lse in float64 for float32 inputs. If it is stored in float32, float32 gradients are
less accurate: as accurate as PyTorch's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foundry_kernels.core.registry import resolve
from foundry_kernels.ops.flash_attention import FLASH_ATTENTION, hopper, reference
from foundry_kernels.ops.flash_attention.options import AttentionOptions

Gradients = tuple[Tensor, Tensor, Tensor]


def serving(backend: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str:
    """The backend that computes both passes of such a call if the caller requests `backend`.

    Raises:
        BackendUnavailable, ValueError: as the public functions.
    """
    resolve(FLASH_ATTENTION, backend, q)  # for its errors
    names: tuple[str, ...] = (backend,)
    if backend == "auto":
        names = (*_first(q, k, v, options), *FLASH_ATTENTION.order(q.device.type, q.dtype))
    return next(name for name in names if FLASH_ATTENTION.why_not(name, q.device.type, q.dtype) is None)


def backend_of(q: Tensor) -> str | None:
    """The backend with kernels for both passes that "auto" takes for such queries, or None: where that is the
    reference, and of float64, which only interpreted kernels take, lse would have to stay float64."""
    if q.dtype == torch.float64:
        return None
    device = q.device.type
    for name in FLASH_ATTENTION.order(device, q.dtype):
        if FLASH_ATTENTION.why_not(name, device, q.dtype) is None:
            return None if name == "reference" else name
    return None


def _first(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[str, ...]:
    """The backend that "auto" tries before its usual order, as in the public functions."""
    first = hopper.first_backend(q, k, v, options)
    return () if first is None or FLASH_ATTENTION.is_measured(q.device.type, q.dtype) else (first,)


def forward(backend: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out, lse float32) of the arguments of the operators: dense with heads first, or packed. Any backend's `backward`
    accepts this lse, so `backend` may be "auto" in both passes."""
    if backend == "auto":
        backend = serving(backend, q, k, v, options)
    out, lse = forward_wide(backend, q, k, v, options)
    return out, lse.to(torch.float32)


@torch.no_grad()
def forward_wide(backend: str, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> tuple[Tensor, Tensor]:
    """(out, lse) as the backend has lse between its passes: float32, or float64 where that makes gradients exact."""
    if backend == "reference":
        attend = reference.flash_attention_varlen if options.packed else reference.flash_attention
        out, lse = attend(q, k, v, options._replace(return_lse=True, return_stats=False))
    elif backend == "triton":
        from foundry_kernels.ops.flash_attention.triton import flash_attention_fwd
        from foundry_kernels.ops.flash_attention.triton.launch import refuse_wide

        refuse_wide(q, v, False)
        out, lse, *_ = flash_attention_fwd(q, k, v, options, True, False)
    else:
        operator = torch.ops.foundry_kernels.flash_attention_fwd.default
        out, lse, *_ = operator(q, k, v, *options.operator_args(), True, False)
    return out, lse


@torch.no_grad()
def backward(
    backend: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: AttentionOptions,
    dlse: Tensor | None = None,
) -> Gradients:  # fmt: skip
    """(dq, dk, dv), from the results of `forward` or `forward_wide` with the same options.

    `out` and `lse` may belong to more keys than k holds; the result is then the part of the gradients that belongs to
    k.
    """
    if backend == "auto":
        backend = serving(backend, q, k, v, options)
    need = (True, True, True, False, False, ())
    if backend == "reference":
        return reference.backward(dout, dlse, q, k, v, out, lse, options)
    if backend == "triton":
        from foundry_kernels.ops.flash_attention.triton import flash_attention_bwd
        from foundry_kernels.ops.flash_attention.triton.kernel_options import tensor_options
        from foundry_kernels.ops.flash_attention.triton.launch import refuse_wide
        from foundry_kernels.ops.flash_attention.triton.problem import lse_dtype

        refuse_wide(q, v, True)
        lse = lse.to(lse_dtype(q.dtype, tensor_options(options).biased))
        dq, dk, dv, *_ = flash_attention_bwd(dout, dlse, q, k, v, out, lse, options, *need)
    else:
        operator = torch.ops.foundry_kernels.flash_attention_bwd.default
        lse = lse.to(torch.float64)
        dq, dk, dv, *_ = operator(dout, dlse, q, k, v, out, lse, *options.operator_args(), *need)
    return dq, dk, dv
