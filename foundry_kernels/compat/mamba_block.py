"""Mamba-2's block between its projections, and its norm, with mamba_ssm's signatures."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foundry_kernels.compat.mamba import causal_conv1d_fn, mamba_chunk_scan_combined
from foundry_kernels.compat.scalars import as_int
from foundry_kernels.core.checks import check_bool, check_float, check_rank, check_shape
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_rms_norm import gated_rms_norm
from foundry_kernels.ops.rms_norm import rms_norm
from foundry_kernels.ops.swiglu import swiglu


def rmsnorm_fn(
    x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor | None = None, eps: float = 1e-6,
    group_size: int | None = None, norm_before_gate: bool = True, *, backend: str = "auto",
) -> Tensor:  # fmt: skip
    """``mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn``: RMSNorm of groups of the last dimension, with a gate.

    ``rms_norm(x) * weight * silu(z)``, or ``rms_norm(x * silu(z)) * weight`` without `norm_before_gate`. The first with
    one group is :func:`foundry_kernels.gated_rms_norm`; otherwise float32 passes, rounded once, follow one another.

    Args:
        x: ``[..., N]``.
        weight: ``[N]``.
        bias: must be None.
        z: as x, or None for no gate.
        eps: added to the mean square.
        group_size: the width of a group, which divides N; None for N.
        norm_before_gate: whether the norm is before the gate.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        y ``[..., N]`` of x's dtype.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    if bias is not None:
        raise ValueError("bias must be None; an RMSNorm has none")
    check_bool("norm_before_gate", norm_before_gate)
    check_float("x", x)
    width = x.shape[-1] if x.dim() else 0
    size = width if group_size is None else as_int("group_size", group_size)
    if size < 1 or width % size:
        raise ValueError(f"group_size must divide x's last dimension; got {size} for shape {tuple(x.shape)}")
    if z is not None:
        check_float("z", z)
        check_shape("z", z, tuple(x.shape), "that of x")
    if z is not None and norm_before_gate and size == width:
        return gated_rms_norm(x, z.to(x.dtype), weight, eps, backend=backend)
    check_float("weight", weight)
    check_shape("weight", weight, (width,), "the width of x")
    y = x.to(wide_dtype(x.dtype))
    gate = None if z is None else z.to(y.dtype)
    if gate is not None and not norm_before_gate:
        y = swiglu(gate, y, backend=backend)
    y = rms_norm(y.unflatten(-1, (-1, size)), None, eps, backend=backend).flatten(-2) * weight.to(y.dtype)
    if gate is not None and norm_before_gate:
        y = swiglu(gate, y, backend=backend)
    return y.to(x.dtype)


class RMSNormGated(nn.Module):
    """``mamba_ssm.ops.triton.layernorm_gated.RMSNorm``: :func:`rmsnorm_fn` with a weight ``[hidden_size]``."""

    def __init__(
        self, hidden_size: int, eps: float = 1e-5, group_size: int | None = None, norm_before_gate: bool = True,
        device: Any = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """The norm of x ``[..., hidden_size]``, gated by z of x's shape."""
        return rmsnorm_fn(x, self.weight, None, z, self.eps, self.group_size, self.norm_before_gate)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor, conv1d_weight: Tensor, conv1d_bias: Tensor | None, dt_bias: Tensor, A: Tensor, D: Tensor,
    chunk_size: int, initial_states: Tensor | None = None, seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf), return_final_states: bool = False,
    activation: str | None = "silu", rmsnorm_weight: Tensor | None = None, rmsnorm_eps: float = 1e-6,
    outproj_weight: Tensor | None = None, outproj_bias: Tensor | None = None, headdim: int | None = None,
    ngroups: int = 1, norm_before_gate: bool = True, *, backend: str = "auto",
) -> Any:  # fmt: skip
    """``mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined``: what a Mamba-2 layer computes behind its
    first projection, as the functions of this package one after another.

    Args:
        zxbcdt: ``[B, T, 2 d + 2 H P + 2 G N + H]``: two parts of a SwiGLU of width d >= 0, the gate z, x, B and C, and
            dt, in this order.
        conv1d_weight: ``[H P + 2 G N, W]``. H P is known from D, so N follows.
        conv1d_bias: ``[H P + 2 G N]``, or None.
        dt_bias: ``[H]``. Softplus is applied to dt and its bias.
        A: ``[H]``.
        D: ``[H]`` or ``[H, P]``.
        chunk_size, initial_states, seq_idx, dt_limit, return_final_states: as for :func:`mamba_chunk_scan_combined`.
        activation: of the convolution: None, "silu" or "swish".
        rmsnorm_weight: ``[H P]``: z gates the norm of y, over ngroups groups. None: z gates y.
        rmsnorm_eps, norm_before_gate: as for :func:`rmsnorm_fn`.
        outproj_weight, outproj_bias: of a linear layer behind, or None.
        headdim: P, which must be given if D is ``[H]``.
        ngroups: G.
        backend: "auto", "reference", "triton" or "native".

    Returns:
        y ``[B, T, d + H P]``, or the last layer's; with `return_final_states`, ``(y, final_states)``.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """
    for name, x, rank, layout in (("zxbcdt", zxbcdt, 3, "[B, T, C]"), ("conv1d_weight", conv1d_weight, 2, "[C, W]")):
        check_float(name, x)
        check_rank(name, x, rank, layout)
    check_float("D", D)
    if D.dim() == 1 and headdim is None:
        raise ValueError("headdim must be given if D is [H]; got None")
    if outproj_bias is not None and outproj_weight is None:
        raise ValueError("outproj_bias must be None without outproj_weight; got a tensor")
    groups = as_int("ngroups", ngroups)
    heads, width = D.shape[0], as_int("headdim", headdim) if D.dim() == 1 else D.shape[-1]
    inner, channels = heads * width, conv1d_weight.shape[0]
    state, rest = divmod(channels - inner, 2 * max(groups, 1))
    mlp, odd = divmod(zxbcdt.shape[-1] - inner - channels - heads, 2)
    if groups < 1 or state < 1 or rest or mlp < 0 or odd:
        raise ValueError(
            "zxbcdt must be [B, T, 2 d + 2 H P + 2 G N + H] and conv1d_weight [H P + 2 G N, W]; got shapes "
            f"{tuple(zxbcdt.shape)} and {tuple(conv1d_weight.shape)} with H {heads}, P {width} and G {ngroups}"
        )
    gated, z, mixed, dt = zxbcdt.split([2 * mlp, inner, channels, heads], -1)
    convolved: Any = causal_conv1d_fn(
        mixed.transpose(1, 2), conv1d_weight, conv1d_bias, seq_idx, activation=activation, backend=backend
    )
    x, B, C = convolved.transpose(1, 2).split([inner, groups * state, groups * state], -1)
    x, z = x.unflatten(-1, (heads, width)), z.unflatten(-1, (heads, width))
    B, C = B.unflatten(-1, (groups, state)), C.unflatten(-1, (groups, state))
    found = mamba_chunk_scan_combined(
        x, dt, A, B, C, chunk_size, D, z if rmsnorm_weight is None else None, dt_bias, initial_states, seq_idx,
        dt_softplus=True, dt_limit=dt_limit, return_final_states=return_final_states, backend=backend,
    )  # fmt: skip
    y, states = found if return_final_states else (found, None)
    y = y.flatten(2)
    if rmsnorm_weight is not None:
        size = inner // groups
        y = rmsnorm_fn(y, rmsnorm_weight, None, z.flatten(2), rmsnorm_eps, size, norm_before_gate, backend=backend)
    if mlp:
        y = torch.cat([swiglu(gated, backend=backend), y], -1)
    if outproj_weight is not None:
        y = F.linear(y, outproj_weight, outproj_bias)
    return (y, states) if return_final_states else y
