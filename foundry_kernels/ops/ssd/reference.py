"""Plain PyTorch, differentiated by autograd: what every kernel of the operations must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from foundry_kernels.core.registry import wide_dtype
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
    read, final = gated_delta_rule(
        *(each.transpose(1, 2) for each in (C, B, x, dt * A.to(dt.dtype), dt)),
        None if initial_states is None else initial_states.mT,
        options.of_attention(),
    )
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
    dt: Tensor, dt_bias: Tensor | None, wide: torch.dtype, use_softplus: bool, least: float, most: float
) -> Tensor:
    dt = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    return (softplus(dt) if use_softplus else dt).clamp(least, most)


def finished(read: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """``(read + D x) silu(z)`` of x's dtype, with the strides of `read`."""
    wide = wide_dtype(x.dtype)
    y = read.to(wide)
    if D is not None:
        y = y + (D if D.dim() == 2 else D[:, None]).to(wide) * x.to(wide)
    y = (y if z is None else y * silu(z.to(wide))).to(x.dtype)
    return y if y.stride() == read.stride() else torch.empty_like(read, dtype=x.dtype).copy_(y)
