"""Plain PyTorch, differentiated by autograd: what every kernel of the operation must equal."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from foundry_kernels.core.registry import wide_dtype


def short_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    cu_seqlens: Tensor | None,
    initial_state: Tensor | None,
    residual: Tensor | None,
    return_final_state: bool,
) -> tuple[Tensor, Tensor | None]:
    batch, length, channels = x.shape
    taps, compute = weight.shape[1], wide_dtype(x.dtype)
    if cu_seqlens is None:
        if initial_state is None:
            initial_state = x.new_zeros(batch, channels, taps - 1)
        row = torch.cat([initial_state.transpose(1, 2), x], 1)  # [B, W - 1 + T, C]
        inputs = [row[:, j : j + length] for j in range(taps)]
        final_state = row[:, length:].transpose(1, 2).contiguous() if return_final_state else None
    else:
        inputs, final_state = _packed(x[0], taps, cu_seqlens, initial_state, return_final_state)
    z: Tensor | float = 0.0 if bias is None else bias.to(compute)
    for j, tap in enumerate(inputs):
        z = z + weight[:, j].to(compute) * tap.to(compute)
    assert isinstance(z, Tensor)
    y = silu(z) if activation == "silu" else z
    if residual is not None:
        y = y + 1.0 * residual.to(compute)  # times 1: its gradient has memory of its own
    return y.to(x.dtype).contiguous(), final_state


def _packed(
    x: Tensor, taps: int, cu_seqlens: Tensor, initial_state: Tensor | None, return_final_state: bool
) -> tuple[list[Tensor], Tensor | None]:
    """The inputs [1, T, C] of each tap, and the final states. Lengths are not read: they may be on a GPU or unknown."""
    total, bounds = x.shape[0], cu_seqlens.long().clamp(0, x.shape[0])
    rows = torch.arange(total, device=x.device)
    document = torch.searchsorted(bounds[1:], rows, right=True).clamp_max(max(bounds.shape[0] - 2, 0))
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])

    def at(position: Tensor, document: Tensor) -> Tensor:
        """x at these positions, some of which are before the first token of their document."""
        first = bounds[document]
        before = padded.new_zeros(())
        if initial_state is not None and taps > 1:
            before = initial_state[document, :, (position - first + taps - 1).clamp(0, taps - 2)]
        return torch.where((position >= first).unsqueeze(-1), padded[position.clamp_min(0)], before)

    inputs = [at(rows - (taps - 1) + j, document).unsqueeze(0) for j in range(taps)]
    if not return_final_state:
        return inputs, None
    each = torch.arange(bounds.shape[0] - 1, device=x.device)
    states = [at(bounds[1:] - (taps - 1) + j, each) for j in range(taps - 1)]
    if not states:
        return inputs, padded[:0].sum() + x.new_zeros(each.shape[0], x.shape[1], 0)
    return inputs, torch.stack(states, -1)


def short_conv1d_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Tensor:
    taps = weight.shape[1]
    row = torch.cat([state, x.unsqueeze(-1)], -1)  # [B, C, S + 1]
    if residual is not None:
        residual = residual.unsqueeze(1)
    y, _ = short_conv1d(row[..., -taps:].transpose(1, 2), weight, bias, activation, None, None, residual, False)
    state.copy_(row[..., 1:])
    return y[:, -1].contiguous()
