"""The scan of a backend: the operators of linear attention, and around them arithmetic on each number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_delta_rule import columns
from foundry_kernels.ops.ssd.options import SsdOptions
from foundry_kernels.ops.ssd.reference import finished, skipped, step_sizes

STEP = (
    "ssd_step(Tensor(a!) state, Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, "
    "Tensor? dt_bias, bool dt_softplus, float dt_min, float dt_max) -> Tensor y"
)

#: Linear attention's forward and backward operator by the prefix of their names, which torch.compile can look up.
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def make_backend(
    prefix: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The backend's function, from its operators of linear attention."""
    _OPERATORS[prefix] = forward, backward

    def ssd(*args: Any) -> tuple[Tensor, Tensor | None]:
        *tensors, options = args
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            y, final = apply(_Ssd, prefix, options, *tensors)
        else:
            read, final, _ = _read(prefix, options, tensors, save_states=False)
            y = finished(read, *_of_result(tensors), _silu)
        return y, final.mT if options.return_final_states else None

    return ssd


# PyTorch's own round the last numbers of a tensor another way than the rest; exp and log1p do not. So a sequence gets
# the same bits at any place in any batch.


def _sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + (-x).exp())


def _silu(x: Tensor) -> Tensor:
    return x * _sigmoid(x)


def _softplus(x: Tensor) -> Tensor:
    """Above 20, as in PyTorch, the number itself."""
    return torch.where(x > 20.0, x, x.clamp(max=20.0).exp().log1p())


def _sizes(options: SsdOptions, tensors: Any) -> Tensor:
    x, dt, dt_bias = tensors[0], tensors[1], tensors[7]
    limits = options.dt_min, options.dt_max
    return step_sizes(dt, dt_bias, wide_dtype(x.dtype), options.dt_softplus, *limits, _softplus)


def _attention(options: SsdOptions, tensors: Any, sizes: Tensor) -> tuple[Tensor | None, ...]:
    """The arguments of linear attention: queries, keys, values, decays, factors of the values, the initial state."""
    x, _, A, B, C, _, _, _, initial_states = tensors
    given = (C, B, x, sizes * A.to(sizes.dtype), sizes)
    return *(each.transpose(1, 2) for each in given), None if initial_states is None else initial_states.mT, None, None


def _read(
    prefix: str, options: SsdOptions, tensors: Any, save_states: bool
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """What is read from the states, ``[B, T, H, P]``, the final states ``[n, H, N, P]``, and what to save."""
    call = options.of_attention()
    given = _attention(options, tensors, _sizes(options, tensors))
    out, final, states = columns.forward(
        _OPERATORS[prefix][0], given, call.operator_args(), call.return_final_state, save_states
    )
    return out.transpose(1, 2), final, states


def _of_result(tensors: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x, D and z."""
    return tensors[0], tensors[5], tensors[6]


class _Ssd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, prefix: str, options: SsdOptions, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        x, D, z = _of_result(tensors)
        ctx.prefix, ctx.options = prefix, options._replace(cu_seqlens=None)
        read, final, states = _read(prefix, options, tensors, save_states=True)
        kept = read if z is not None and ctx.needs_input_grad[2 + 6] else None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, kept, options.cu_seqlens, *states)
        if not any(ctx.needs_input_grad[2 + i] for i in (0, 1, 2, 3, 7, 8)):  # states do not depend on C, D and z
            ctx.mark_non_differentiable(final)
        return finished(read, x, D, z, _silu), final

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> Any:
        refuse_second_derivative("ssd")
        saved = ctx.saved_tensors  # once: a checkpoint gives them once
        tensors, (read, cu_seqlens, *states) = saved[:9], saved[9:]
        x, D, z = _of_result(tensors)
        options = ctx.options._replace(cu_seqlens=cu_seqlens)
        needs_x, needs_dt, needs_A, needs_B, needs_C, needs_D, needs_z, needs_bias, needs_initial = needs = (
            ctx.needs_input_grad[2:]
        )
        dx = ddt = dA = dB = dC = dD = dz = dbias = dinitial = None
        if dy is None:
            dy = torch.zeros_like(x)
        dread, wide = dy, wide_dtype(x.dtype)
        if z is not None:
            if needs_z:
                gate, open_ = z.to(wide), _sigmoid(z.to(wide))
                dz = (skipped(read, x, D) * dy.to(wide) * open_ * (1.0 + gate * (1.0 - open_))).to(z.dtype)
            dread = dy.to(wide) * _silu(z.to(wide))
        if needs_D and D is not None:
            product = dread * x if dread.dtype == wide else dread.to(wide) * x.to(wide)
            dD = product.sum((0, 1, 3) if D.dim() == 1 else (0, 1)).to(D.dtype)
        if any((needs_x, needs_dt, needs_A, needs_B, needs_C, needs_bias, needs_initial)):
            sizes = _sizes(options, tensors)
            attention, call = _attention(options, tensors, sizes), options.of_attention()
            dfinal = dfinal if options.return_final_states else None  # torch.compile materializes it
            needs_g, needs_beta = needs_dt or needs_A or needs_bias, needs_dt or needs_bias
            wanted = needs_C, needs_B, needs_x, needs_g, needs_beta, needs_initial, False, False
            dout = dread.to(x.dtype).transpose(1, 2)
            dq, dk, dv, dg, dbeta, dstate, *_ = columns.backward(
                _OPERATORS[ctx.prefix][1], dout, dfinal, attention, states, call.operator_args(), wanted
            )
            dC, dB, dx = dq.transpose(1, 2) if needs_C else None, dk.transpose(1, 2) if needs_B else None, None
            if needs_x:
                dx = dv.transpose(1, 2)
                if D is not None:
                    factor = D if D.dim() == 2 else D[:, None]
                    same = dx.dtype == dread.dtype == D.dtype
                    dx = dx.addcmul_(dread, factor) if same else dx + (dread * factor).to(dx.dtype)
            if needs_A:
                dA = (dg.transpose(1, 2) * sizes).sum((0, 1)).to(tensors[2].dtype)
            if needs_dt or needs_bias:
                dsizes = dbeta.transpose(1, 2) + dg.transpose(1, 2) * tensors[2].to(sizes.dtype)
                ddt = _through_sizes(dsizes, sizes, options, tensors)
                dbias = ddt.sum((0, 1)).to(tensors[7].dtype) if needs_bias else None
                ddt = ddt.to(tensors[1].dtype) if needs_dt else None
            dinitial = dstate.mT if needs_initial else None
        found = dx, ddt, dA, dB, dC, dD, dz, dbias, dinitial
        return None, None, *(each if need else None for each, need in zip(found, needs, strict=True))


def _through_sizes(dsizes: Tensor, sizes: Tensor, options: SsdOptions, tensors: Any) -> Tensor:
    """The gradient of dt and its bias. The limits have none for step sizes beyond them."""
    if options.dt_min > -math.inf or options.dt_max < math.inf:
        raw = _sizes(options._replace(dt_min=-math.inf, dt_max=math.inf), tensors)
        dsizes = torch.where(raw == sizes, dsizes, 0.0)
    if not options.dt_softplus:
        return dsizes
    dt, bias = tensors[1].to(dsizes.dtype), tensors[7]
    raw = dt if bias is None else dt + bias.to(dsizes.dtype)
    return dsizes * torch.where(raw > 20.0, 1.0, _sigmoid(raw))
