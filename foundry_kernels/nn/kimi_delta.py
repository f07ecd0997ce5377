r"""Linear attention by the gated delta rule with a decay for each key channel: the layer of Kimi Linear."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_bool
from foundry_kernels.nn._backend import Backend
from foundry_kernels.nn._delta import Gates, reset_decay
from foundry_kernels.nn._linear_layers import Layers
from foundry_kernels.nn.gated_delta_net import DeltaMixer
from foundry_kernels.nn.norm import RMSNorm


class KimiDeltaAttention(DeltaMixer):
    r"""Kimi Delta Attention (KDA), a gated delta rule whose state decays by channel; its parameters have the names of
    Kimi Linear in transformers.

    For an input x ``[B, T, dim]``, with the heads of keys repeated for the heads of values,

    .. math:: q, k, v &= \mathrm{silu}(\mathrm{conv}([W_q x, W_k x, W_v x])), \quad \beta = \sigma(W_b x) \\
       g &= -e^{A} \, \mathrm{softplus}(W_{f_b} W_{f_a} x + \mathrm{dt\_bias}) \\
       o &= \mathrm{gated\_delta\_rule}(q / |q|, k / |k|, v, g, \beta) \\
       y &= W_o (\mathrm{rms\_norm}(o) \cdot w \cdot \sigma(W_{g_b} W_{g_a} x))

    where g has a logarithm of the decay for each of the D_k dimensions of a key, which the kernels of
    :func:`foundry_kernels.gated_delta_rule` compute, and the rest is as in :class:`GatedDeltaNet`.

    Args:
        dim: width of the input and the output.
        n_v_heads: heads H_v of values, decays and step sizes.
        n_k_heads: heads H_k of queries and keys, a divisor of `n_v_heads`; None is `n_v_heads`.
        head_k_dim: D_k, the width of a query or key, at most 256.
        head_v_dim: D_v, the width of a value, at most 512; None is `head_k_dim`.
        conv_size: W, the taps of a filter, in 1 .. 8.
        low_rank_gate: make the gate of the result by `g_a_proj` and `g_b_proj`, or by one matrix, `g_proj`.
        norm_eps: epsilon of the norm.
        backend: a backend's name, or a mapping of operations to names.

    Attributes:
        q_proj, k_proj, v_proj, b_proj, f_a_proj, f_b_proj, g_a_proj and g_b_proj or g_proj, o_proj: the projections,
            ``nn.Linear`` without biases. `f_a_proj` and `g_a_proj` have D_v outputs.
        conv1d: holds the filters ``[2 H_k D_k + H_v D_v, 1, W]``.
        A_log, dt_bias: ``[H_v]`` and ``[H_v D_k]``.
        o_norm: the :class:`RMSNorm` of a head.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is out of range, `n_v_heads` is not a multiple of `n_k_heads`, or an unknown backend.

    Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025, arXiv:2510.26692.
    """

    GATE = "sigmoid"
    ROUNDS = False

    def __init__(
        self,
        dim: int,
        n_v_heads: int,
        n_k_heads: int | None = None,
        head_k_dim: int = 128,
        head_v_dim: int | None = None,
        *,
        conv_size: int = 4,
        low_rank_gate: bool = True,
        norm_eps: float | None = 1e-5,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(dim, n_v_heads, n_k_heads, head_k_dim, head_v_dim, conv_size, norm_eps, backend)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_bool("low_rank_gate", low_rank_gate)
        rank = self.head_v_dim
        keys, values, decays = self.n_k_heads * head_k_dim, n_v_heads * rank, n_v_heads * head_k_dim
        self.A_log = torch.nn.Parameter(torch.empty(n_v_heads, **factory))
        self.dt_bias = torch.nn.Parameter(torch.empty(decays, **factory))
        if not self.A_log.is_meta:
            self.reset_parameters()
        self.conv1d = self._filters(**factory)
        factory["bias"] = False
        self.q_proj = torch.nn.Linear(dim, keys, **factory)
        self.k_proj = torch.nn.Linear(dim, keys, **factory)
        self.v_proj = torch.nn.Linear(dim, values, **factory)
        self.b_proj = torch.nn.Linear(dim, n_v_heads, **factory)
        self.f_a_proj = torch.nn.Linear(dim, rank, **factory)
        self.f_b_proj = torch.nn.Linear(rank, decays, **factory)
        if low_rank_gate:
            self.g_a_proj = torch.nn.Linear(dim, rank, **factory)
            self.g_b_proj = torch.nn.Linear(rank, values, **factory)
        else:
            self.g_proj = torch.nn.Linear(dim, values, **factory)
        self.low_rank_gate = low_rank_gate
        self.o_norm = RMSNorm(rank, norm_eps, device=device, dtype=dtype, backend=self.backends)
        self.o_proj = torch.nn.Linear(values, dim, **factory)

    @property
    def output_projection(self) -> torch.nn.Linear:
        return self.o_proj

    @property
    def norm_of_heads(self) -> RMSNorm:
        return self.o_norm

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Sets ``exp(A_log)`` to U(1, 16), and `dt_bias` so that its softplus is log-uniform in 0.001 .. 0.1. The
        modules in it are left as they are."""
        reset_decay(self.A_log, self.dt_bias, generator)

    def _parts(self, layers: Layers, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        gate = self.g_a_proj if self.low_rank_gate else self.g_proj
        convolved, others = (self.q_proj, self.k_proj, self.v_proj), (gate, self.b_proj, self.f_a_proj)
        if (mixed := layers.together(x, *convolved)) is None:
            mixed = torch.cat(layers.each(x, *convolved), -1)
        if (together := layers.together(x, *others)) is None:
            z, b, a = layers.each(x, *others)
        else:
            z, b, a = together.split([layer.out_features for layer in others], -1)
        if self.low_rank_gate:
            z = layers.linear(z, self.g_b_proj)
        return mixed, z, b, layers.linear(a, self.f_b_proj).unflatten(-1, (self.n_v_heads, self.head_k_dim))

    def _gates(self) -> Gates:
        return Gates(self.A_log, self.dt_bias.view(self.n_v_heads, self.head_k_dim))

    def _extra(self) -> str:
        return "" if self.low_rank_gate else ", low_rank_gate=False"
