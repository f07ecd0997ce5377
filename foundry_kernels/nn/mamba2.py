r"""State-space duality as a module: the layer of Mamba-2, Bamba, Granite 4 and Nemotron-H."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_bool, check_int, check_not_negative
from foundry_kernels.core.choices import check_scales
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.nn._backend import Backend, describe
from foundry_kernels.nn._delta import allowed, reset_decay, taps_of
from foundry_kernels.nn._linear_layers import layers_for
from foundry_kernels.nn.linear_attention import GatedDeltaState, LinearMixer
from foundry_kernels.nn.norm import RMSNorm
from foundry_kernels.ops.rms_norm import rms_norm
from foundry_kernels.ops.ssd import ssd, ssd_step
from foundry_kernels.ops.ssd.checks import check_limits
from foundry_kernels.ops.swiglu import swiglu


class Mamba2(LinearMixer):
    r"""Mamba-2's layer; its parameters have the names and shapes of transformers' and mamba_ssm's.

    For an input u ``[B, T, dim]``, with n_groups vectors B and C that heads share,

    .. math:: z, xBC, dt &= W_{in} u, \quad x, B, C = \mathrm{silu}(\mathrm{conv}(xBC)) \\
       y &= \mathrm{ssd}(x, dt, -e^{A}, B, C, D) \cdot \mathrm{silu}(z) \\
       out &= W_{out} (\mathrm{rms\_norm}(y) \cdot w)

    where the convolution is causal along time, with a filter for each channel (:func:`foundry_kernels.short_conv1d`),
    :func:`foundry_kernels.ssd` adds `dt_bias` to dt and takes its softplus and limits, and the norm is over the heads
    of one of `norm_groups` groups. There are no positions: the order of tokens is in the convolution and the decay.
    Work and memory are linear in T, and a step of decoding needs a state of constant size.

    Args:
        dim: width of the input and the output.
        n_heads: heads H of inputs x and step sizes.
        n_groups: groups of heads, a divisor of `n_heads`.
        state_dim: N, the width of B and C, at most 256.
        head_dim: P, the width of a head, at most 512.
        conv_size: W, the taps of a filter, in 1 .. 8.
        bias: biases of `in_proj` and `out_proj`.
        conv_bias: a bias of the convolution.
        dt_limit: the least and the largest step size; None is no limit.
        in_scales: factors on z, x, B, C and dt (Falcon-H1).
        rmsnorm: whether there is a norm.
        norm_before_gate: the gate ``silu(z)`` multiplies the norm's result, not its input.
        norm_groups: groups of heads that are normalized separately, a divisor of `n_heads`; None is `n_groups`.
        norm_eps: epsilon of the norm.
        norm_round_before_weight: round ``y / rms`` before the weight multiplies, as transformers does; see
            :class:`RMSNorm`. With several groups it always is.
        backend: a backend's name, or a mapping of operations to names.

    Attributes:
        in_proj, out_proj: the projections.
        conv1d: holds the filters ``[H P + 2 n_groups N, 1, W]``.
        A_log, D, dt_bias: ``[H]``.
        norm: holds the norm's weight ``[H P]``; None without a norm.

    Raises:
        TypeError: an argument has another type.
        ValueError: a size is out of range, `n_heads` is not a multiple of `n_groups` or `norm_groups`, or an unknown
            backend.

    Dao, Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
    Duality", 2024, arXiv:2405.21060.
    """

    OPS = ("short_conv1d", "ssd", "ssd_step", "rms_norm", "swiglu")
    PRODUCTS = 2

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_groups: int = 1,
        state_dim: int = 128,
        head_dim: int = 64,
        *,
        conv_size: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        dt_limit: tuple[float | None, float | None] = (0.0, None),
        in_scales: tuple[float, ...] = (1.0,) * 5,
        rmsnorm: bool = True,
        norm_before_gate: bool = False,
        norm_groups: int | None = None,
        norm_eps: float | None = 1e-5,
        norm_round_before_weight: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        sizes = {"n_heads": n_heads, "n_groups": n_groups, "state_dim": state_dim, "head_dim": head_dim}
        super().__init__(dim, conv_size, backend, **sizes)
        check_bool("bias", bias)
        check_bool("conv_bias", conv_bias)
        check_bool("rmsnorm", rmsnorm)
        check_bool("norm_before_gate", norm_before_gate)
        if norm_before_gate and not rmsnorm:
            raise ValueError("norm_before_gate needs rmsnorm=True: there is no norm; got True")
        if norm_eps is not None:
            check_not_negative("norm_eps", norm_eps)
        self.n_heads, self.n_groups, self.state_dim, self.head_dim = self.sizes
        self.norm_groups = n_groups if norm_groups is None else norm_groups
        check_int("norm_groups", self.norm_groups, 1)
        if n_heads % self.norm_groups:
            raise ValueError(f"norm_groups must be a divisor of n_heads={n_heads}; got {self.norm_groups}")
        self.norm_before_gate, self.in_scales = norm_before_gate, check_scales("in_scales", in_scales, 5)
        self.dt_limit = check_limits("dt_limit", dt_limit)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        values, channels = n_heads * head_dim, self.channels
        self.A_log = torch.nn.Parameter(torch.empty(n_heads, **factory))
        self.D = torch.nn.Parameter(torch.empty(n_heads, **factory))
        self.dt_bias = torch.nn.Parameter(torch.empty(n_heads, **factory))
        if not self.A_log.is_meta:
            self.reset_parameters()
        self.in_proj = torch.nn.Linear(dim, values + channels + n_heads, bias=bias, **factory)
        self.conv1d = self._filters(conv_bias, **factory)
        norm: dict[str, Any] = {"round_before_weight": norm_round_before_weight, "backend": self.backends}
        self.norm = RMSNorm(values, norm_eps, **factory, **norm) if rmsnorm else None
        self.out_proj = torch.nn.Linear(values, dim, bias=bias, **factory)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Sets ``exp(A_log)`` to U(1, 16), D to 1, and `dt_bias` so that step sizes begin log-uniform in 0.001 .. 0.1,
        as mamba_ssm does. The modules in it are left as they are."""
        reset_decay(self.A_log, self.dt_bias, generator)
        with torch.no_grad():
            self.D.fill_(1.0)

    def _forward(self, x: Tensor, cu_seqlens: Tensor | None, state: GatedDeltaState | None) -> Tensor:
        layers = layers_for(x, self.backends["ssd"])
        values = self.n_heads * self.head_dim
        shared = self.n_groups * self.state_dim
        projected = layers.linear(x, self.in_proj)
        if self.in_scales != (1.0,) * 5:
            parts = projected.split((values, values, shared, shared, self.n_heads), -1)
            projected = torch.cat([part * scale for part, scale in zip(parts, self.in_scales, strict=True)], -1)
        z, mixed, dt = projected.split((values, self.channels, self.n_heads), -1)
        mixed, conv, steps = self._convolved(mixed, taps_of(self.conv1d.weight), self.conv1d.bias, cu_seqlens, state)
        if steps:
            z, dt = z.squeeze(1), dt.squeeze(1)
        head, B, C = mixed.split((values, shared, shared), -1)
        heads, groups = (self.n_heads, self.head_dim), (self.n_groups, self.state_dim)
        given: tuple[Any, ...] = (
            head.unflatten(-1, heads),
            dt,
            -self.A_log.to(wide_dtype(mixed.dtype)).exp(),
            B.unflatten(-1, groups),
            C.unflatten(-1, groups),
            allowed(self.D, mixed),
            None if self.norm_before_gate else z.unflatten(-1, heads),
            allowed(self.dt_bias, mixed),
        )
        options: dict[str, Any] = {"dt_softplus": True, "dt_limit": self.dt_limit}
        if state is None:
            scan = ssd if self.sharded is None else self.sharded.ssd
            y: Any = scan(*given, **options, cu_seqlens=cu_seqlens, backend=self.backends["ssd"])
        elif steps:
            # The state has the order of the delta rule's, [B, H, N, P].
            y = ssd_step(state.recurrent.mT, *given, **options, backend=self.backends["ssd_step"]).unsqueeze(1)
        else:
            options |= {"initial_states": state.recurrent.mT, "return_final_states": True, "cu_seqlens": cu_seqlens}
            y, final = ssd(*given, **options, backend=self.backends["ssd"])
            state.conv.copy_(conv)  # type: ignore[arg-type]  # which there is without a step
            state.recurrent.copy_(final.mT)
        y = y.flatten(2)
        if self.norm is not None:
            y = self._normed(y, self.norm)
        if self.norm_before_gate:
            y = swiglu(z.reshape(y.shape), y.to(z.dtype), backend=self.backends["swiglu"])
        return layers.linear(y, self.out_proj)

    def _normed(self, y: Tensor, norm: RMSNorm) -> Tensor:
        if self.norm_groups == 1:
            found: Tensor = norm(y)
            return found
        rows = y.unflatten(-1, (self.norm_groups, -1))
        normed = rms_norm(rows, None, norm.eps, backend=self.backends["rms_norm"]).flatten(-2)
        return normed * norm.weight

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, n_heads={self.n_heads}, n_groups={self.n_groups}, state_dim={self.state_dim}, "
            f"head_dim={self.head_dim}, conv_size={self.conv_size}, dt_limit={self.dt_limit}, "
            f"backend={describe(self.backends)}"
        )
