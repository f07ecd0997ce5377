r"""Linear attention by the gated delta rule as a module: the layer of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_bool, check_not_negative
from foundry_kernels.nn._backend import Backend, describe
from foundry_kernels.nn._delta import DELTA_OPS, Gates, delta_rule_of, delta_rule_step_of, taps_of
from foundry_kernels.nn._linear_layers import Layers, layers_for
from foundry_kernels.nn.linear_attention import GatedDeltaState, LinearMixer
from foundry_kernels.nn.norm import RMSNorm
from foundry_kernels.ops.gated_rms_norm import gated_rms_norm


class DeltaMixer(LinearMixer):
    """The base of layers of the gated delta rule, which have the projections, the gates and the norm of a head."""

    OPS = (*DELTA_OPS, "rms_norm", "gated_rms_norm")
    PRODUCTS = 3
    #: The activation of the gate of the heads' results.
    GATE: ClassVar[str] = "silu"

    conv1d: torch.nn.Conv1d

    def __init__(
        self,
        dim: int,
        n_v_heads: int,
        n_k_heads: int | None,
        head_k_dim: int,
        head_v_dim: int | None,
        conv_size: int,
        norm_eps: float | None,
        backend: Backend,
    ) -> None:
        n_k_heads = n_v_heads if n_k_heads is None else n_k_heads
        head_v_dim = head_k_dim if head_v_dim is None else head_v_dim
        sizes = {"n_v_heads": n_v_heads, "n_k_heads": n_k_heads, "head_k_dim": head_k_dim, "head_v_dim": head_v_dim}
        super().__init__(dim, conv_size, backend, **sizes)
        if norm_eps is not None:
            check_not_negative("norm_eps", norm_eps)
        self.n_v_heads, self.n_k_heads, self.head_k_dim, self.head_v_dim = self.sizes

    def _parts(self, layers: Layers, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The convolution's input ``[B, T, C]``, the gate ``[B, T, H_v D_v]``, and what `_gates` takes: step sizes
        ``[B, T, H_v]`` and decays ``[B, T, H_v]`` or ``[B, T, H_v, D_k]``."""
        raise NotImplementedError

    def _gates(self) -> Gates:
        raise NotImplementedError

    @property
    def norm_of_heads(self) -> RMSNorm:
        return self.norm  # type: ignore[return-value]

    def _forward(self, x: Tensor, cu_seqlens: Tensor | None, state: GatedDeltaState | None) -> Tensor:
        layers = layers_for(x, self.backends["gated_delta_rule"])
        qkv, z, b, a = self._parts(layers, x)
        mixed, conv, steps = self._convolved(qkv, taps_of(self.conv1d.weight), None, cu_seqlens, state)
        a, b = a.transpose(1, 2), b.transpose(1, 2)
        gates, norm = self._gates(), self.norm_of_heads
        heads, dims = (self.n_k_heads, self.n_v_heads), (self.head_k_dim, self.head_v_dim)
        if state is not None and steps:
            out = delta_rule_step_of(mixed, a, b, gates, heads, dims, self.backends, state.recurrent)
        else:
            initial = None if state is None else state.recurrent
            out, final = delta_rule_of(
                mixed,
                a,
                b,
                gates,
                heads,
                dims,
                self.backends,
                cu_seqlens=cu_seqlens,
                initial_state=initial,
                return_final_state=state is not None,
                sharded=self.sharded,
            )
            if state is not None and conv is not None and final is not None:
                state.conv.copy_(conv)
                state.recurrent.copy_(final)
        y = gated_rms_norm(
            out,
            z.view(out.shape).to(out.dtype),
            norm.weight,
            norm.eps,
            activation=self.GATE,
            round_before_weight=norm.round_before_weight,
            backend=self.backends["gated_rms_norm"],
        )
        return layers.linear(y.flatten(2), self.output_projection)

    def extra_repr(self) -> str:
        return (
            f"{self.dim}, n_v_heads={self.n_v_heads}, n_k_heads={self.n_k_heads}, head_k_dim={self.head_k_dim}, "
            f"head_v_dim={self.head_v_dim}, conv_size={self.conv_size}{self._extra()}, "
            f"backend={describe(self.backends)}"
        )

    def _extra(self) -> str:
        return ""


class GatedDeltaNet(DeltaMixer):
    r"""Linear attention with the gated delta rule; its parameters have the names and shapes of Qwen3.5's.

    For an input x ``[B, T, dim]``, with the heads of keys repeated for the heads of values,

    .. math:: q, k, v &= \mathrm{silu}(\mathrm{conv}(W_{qkv} x)), \quad z = W_z x \\
       \beta &= \sigma(W_b x), \quad g = -e^{A} \, \mathrm{softplus}(W_a x + \mathrm{dt\_bias}) \\
       o &= \mathrm{gated\_delta\_rule}(q / |q|, k / |k|, v, g, \beta) \\
       y &= W_{out} (\mathrm{rms\_norm}(o) \cdot w \cdot \mathrm{silu}(z))

    where the convolution is causal along time, with a filter for each channel (:func:`foundry_kernels.short_conv1d`),
    and the norm is over a head (:func:`foundry_kernels.gated_delta_rule` has the rule). There are no positions: the
    order of tokens is in the convolution and the decay. Work and memory are linear in T, and a step of decoding needs
    a state of constant size.

    Args:
        dim: width of the input and the output.
        n_v_heads: heads H_v of values, decays and step sizes.
        n_k_heads: heads H_k of queries and keys, a divisor of `n_v_heads`; None is `n_v_heads`.
        head_k_dim: D_k, the width of a query or key, at most 256.
        head_v_dim: D_v, the width of a value, at most 512; None is `head_k_dim`.
        conv_size: W, the taps of a filter, in 1 .. 8.
        norm_eps: epsilon of the norm.
        norm_round_before_weight: round ``o / rms`` before the weight multiplies, as Qwen's own code does; see
            :class:`RMSNorm`.
        negative_eigenvalues: step sizes are twice as large, in 0 .. 2, so that a state can change its sign (OLMo
            Hybrid).
        backend: a backend's name, or a mapping of operations to names.

    Attributes:
        in_proj_qkv, in_proj_z, in_proj_b, in_proj_a, out_proj: the projections, ``nn.Linear`` without biases.
        conv1d: holds the filters ``[2 H_k D_k + H_v D_v, 1, W]``.
        A_log, dt_bias: ``[H_v]``.
        norm: the :class:`RMSNorm` of a head.

    Raises:
        TypeError: a size is not an int.
        ValueError: a size is out of range, `n_v_heads` is not a multiple of `n_k_heads`, or an unknown backend.

    Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, arXiv:2412.06464.
    """

    def __init__(
        self,
        dim: int,
        n_v_heads: int,
        n_k_heads: int | None = None,
        head_k_dim: int = 128,
        head_v_dim: int | None = None,
        *,
        conv_size: int = 4,
        norm_eps: float | None = 1e-6,
        norm_round_before_weight: bool = False,
        negative_eigenvalues: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__(dim, n_v_heads, n_k_heads, head_k_dim, head_v_dim, conv_size, norm_eps, backend)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_bool("negative_eigenvalues", negative_eigenvalues)
        self.negative_eigenvalues = negative_eigenvalues
        values = n_v_heads * self.head_v_dim
        self.A_log = torch.nn.Parameter(torch.empty(n_v_heads, **factory))
        self.dt_bias = torch.nn.Parameter(torch.empty(n_v_heads, **factory))
        if not self.A_log.is_meta:
            self.reset_parameters()
        self.in_proj_qkv = torch.nn.Linear(dim, self.channels, bias=False, **factory)
        self.in_proj_z = torch.nn.Linear(dim, values, bias=False, **factory)
        self.in_proj_b = torch.nn.Linear(dim, n_v_heads, bias=False, **factory)
        self.in_proj_a = torch.nn.Linear(dim, n_v_heads, bias=False, **factory)
        self.conv1d = self._filters(**factory)
        norm: dict[str, Any] = {"round_before_weight": norm_round_before_weight, "backend": self.backends}
        self.norm = RMSNorm(self.head_v_dim, norm_eps, **factory, **norm)
        self.out_proj = torch.nn.Linear(values, dim, bias=False, **factory)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Sets ``exp(A_log)`` to U(0.01, 16) and `dt_bias` to 1, as Qwen3-Next does. The modules in it are left as they
        are."""
        with torch.no_grad():
            drawn = torch.empty_like(self.A_log, dtype=torch.float32).uniform_(0.01, 16.0, generator=generator)
            self.A_log.copy_(drawn.log_())
            self.dt_bias.fill_(1.0)

    def _parts(self, layers: Layers, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        projections = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        if (together := layers.together(x, *projections)) is None:
            qkv, z, b, a = layers.each(x, *projections)
        else:
            qkv, z, b, a = together.split([layer.out_features for layer in projections], -1)
        return qkv, z, b, a

    def _gates(self) -> Gates:
        return Gates(self.A_log, self.dt_bias, 2.0 if self.negative_eigenvalues else 1.0)

    def _extra(self) -> str:
        return ", negative_eigenvalues=True" if self.negative_eigenvalues else ""
