"""Plain PyTorch, differentiated by autograd: what every kernel of the operations must equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from foundry_kernels.core.layout import inverse, storage_order
from foundry_kernels.core.registry import is_dtensor, wide_dtype
from foundry_kernels.ops.gated_delta_rule.reference import advance, gated_delta_rule
from foundry_kernels.ops.ssd.options import SsdOptions


def ssd(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_states: Tensor | None,
    options: SsdOptions,
) -> tuple[Tensor, Tensor | None]:
    dt = step_sizes(dt, dt_bias, wide_dtype(x.dtype), options.dt_softplus, options.dt_min, options.dt_max)
    q, k, v, g, beta = (each.transpose(1, 2) for each in (C, B, x, dt * A.to(dt.dtype), dt))
    initial = None if initial_states is None else initial_states.mT
    read, final = gated_delta_rule(q, k, v, g, beta, initial, None, None, options.of_attention())
    return finished(read.transpose(1, 2), x, D, z), None if final is None else final.mT


def ssd_step(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
) -> Tensor:
    wide = state.dtype
    dt = step_sizes(dt, dt_bias, wide, dt_softplus, dt_min, dt_max)
    B, C = (each.to(wide).repeat_interleave(x.shape[1] // each.shape[1], 1) for each in (B, C))
    y, after = advance(state.mT, C, B, x.to(wide), dt * A.to(wide), dt, delta=False)
    state.copy_(after.mT)
    return finished(y, x, D, z).contiguous()


def step_sizes(
    dt: Tensor, dt_bias: Tensor | None, wide: torch.dtype, use_softplus: bool, least: float, most: float,
    softplus: Callable[[Tensor], Tensor] = softplus,
) -> Tensor:  # fmt: skip
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    return (softplus(dt) if use_softplus else dt).clamp(least, most)


def finished(
    read: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None, silu: Callable[[Tensor], Tensor] = silu
) -> Tensor:
    """``(read + D x) silu(z)`` of x's dtype, dense in x's storage order unless it is a DTensor."""
    y = skipped(read, x, D)
    y = (y if z is None else y * silu(z.to(y.dtype))).to(x.dtype)
    if is_dtensor(y):  # the shards may lie in another order than its strides say
        return y
    order = storage_order(x)
    y = y.permute(order)
    return y.reshape(-1).view(y.shape).permute(inverse(order))


def skipped(read: Tensor, x: Tensor, D: Tensor | None) -> Tensor:
    """``read + D x`` in the dtype of the arithmetic."""
    wide = wide_dtype(x.dtype)
    if D is None:
        return read.to(wide)
    return torch.addcmul(read.to(wide), x.to(wide), (D if D.dim() == 2 else D[:, None]).to(wide))
