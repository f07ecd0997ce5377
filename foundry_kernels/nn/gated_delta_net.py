r"""Linear attention by the gated delta rule as a module: the layer of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.checks import (
    check_bool,
    check_dtype,
    check_int,
    check_integer,
    check_not_negative,
    check_rank,
    check_shape,
    check_tensor,
)
from foundry_kernels.core.inference import recorded, without_backward
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._delta import (
    DELTA_OPS,
    Gates,
    ShardedDelta,
    delta_rule_of,
    delta_rule_step_of,
    taps_of,
)
from foundry_kernels.nn._linear_layers import layers_for
from foundry_kernels.nn._paged import NO_GRADIENT
from foundry_kernels.nn._scripting import refuse_scripting
from foundry_kernels.nn.norm import RMSNorm
from foundry_kernels.ops.gated_delta_rule.checks import MAX_HEAD_DIM, MAX_VALUE_DIM
from foundry_kernels.ops.gated_rms_norm import gated_rms_norm
from foundry_kernels.ops.short_conv1d import MAX_TAPS, short_conv1d, short_conv1d_step


class GatedDeltaState(NamedTuple):
    """What a :class:`GatedDeltaNet` keeps of N sequences so far. Calls overwrite both tensors.

    conv: ``[N, C, conv_size - 1]``, the last inputs of the convolution, the newest last, in their dtype. recurrent:
    ``[N, n_v_heads, head_k_dim, head_v_dim]`` float32 (float64), the states of the gated delta rule. Zeros are the
    state before the first token.
    """

    conv: Tensor
    recurrent: Tensor

    def reset(self) -> None:
        """Makes it the state before the first token again."""
        self.conv.zero_()
        self.recurrent.zero_()


class GatedDeltaNet(torch.nn.Module):
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

    __prepare_scriptable__ = refuse_scripting

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
        super().__init__()
        n_k_heads = n_v_heads if n_k_heads is None else n_k_heads
        head_v_dim = head_k_dim if head_v_dim is None else head_v_dim
        _check_sizes(dim, n_v_heads, n_k_heads, head_k_dim, head_v_dim, conv_size)
        check_bool("negative_eigenvalues", negative_eigenvalues)
        if norm_eps is not None:
            check_not_negative("norm_eps", norm_eps)
        self.backends = plan(backend, (*DELTA_OPS, "rms_norm", "gated_rms_norm"))
        self.dim, self.n_v_heads, self.n_k_heads = dim, n_v_heads, n_k_heads
        self.head_k_dim, self.head_v_dim, self.conv_size = head_k_dim, head_v_dim, conv_size
        self.negative_eigenvalues = negative_eigenvalues
        self.sharded: ShardedDelta | None = None
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        keys, values = n_k_heads * head_k_dim, n_v_heads * head_v_dim
        channels = 2 * keys + values
        self.A_log = torch.nn.Parameter(torch.empty(n_v_heads, **factory))
        self.dt_bias = torch.nn.Parameter(torch.empty(n_v_heads, **factory))
        if not self.A_log.is_meta:
            self.reset_parameters()
        self.in_proj_qkv = torch.nn.Linear(dim, channels, bias=False, **factory)
        self.in_proj_z = torch.nn.Linear(dim, values, bias=False, **factory)
        self.in_proj_b = torch.nn.Linear(dim, n_v_heads, bias=False, **factory)
        self.in_proj_a = torch.nn.Linear(dim, n_v_heads, bias=False, **factory)
        self.conv1d = torch.nn.Conv1d(
            channels, channels, conv_size, padding=conv_size - 1, groups=channels, bias=False, **factory
        )
        norm: dict[str, Any] = {"round_before_weight": norm_round_before_weight, "backend": self.backends}
        self.norm = RMSNorm(head_v_dim, norm_eps, **factory, **norm)
        self.out_proj = torch.nn.Linear(values, dim, bias=False, **factory)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Sets ``exp(A_log)`` to U(0.01, 16) and `dt_bias` to 1, as Qwen3-Next does. The modules in it are left as they
        are."""
        with torch.no_grad():
            drawn = torch.empty_like(self.A_log, dtype=torch.float32).uniform_(0.01, 16.0, generator=generator)
            self.A_log.copy_(drawn.log_())
            self.dt_bias.fill_(1.0)

    def forward(self, x: Tensor, *, cu_seqlens: Tensor | None = None, state: GatedDeltaState | None = None) -> Tensor:
        """x ``[B, T, dim]`` to ``[B, T, dim]``.

        Args:
            cu_seqlens: ``[N + 1]`` int32 or int64 of a packed batch: x is ``[1, total, dim]`` and holds N sequences one
                after the other, sequence n at the tokens ``cu_seqlens[n] .. cu_seqlens[n + 1] - 1``. Nothing passes
                from one to another.
            state: of B sequences (with `cu_seqlens` of N), from :meth:`make_state` or an earlier call: x continues
                them, and the state is overwritten by the one after x. Such a call has no gradient.

        Raises:
            TypeError: x is not a tensor, or cu_seqlens is not an integer tensor.
            ValueError: x or the state has another shape or dtype, or an error of the operations.
            RuntimeError: a backward pass reaches the result of a call with a state.
        """
        check_tensor("x", x)
        check_rank("x", x, 3, f"[B, T, {self.dim}]")
        if x.shape[-1] != self.dim:
            raise ValueError(f"x must have dim={self.dim} as its last dimension; got shape {tuple(x.shape)}")
        sequences = x.shape[0]
        if cu_seqlens is not None:
            check_integer("cu_seqlens", cu_seqlens, 1, "[N + 1]")
            if x.shape[0] != 1:
                raise ValueError(f"x must be [1, total, {self.dim}] with cu_seqlens; got shape {tuple(x.shape)}")
            sequences = cu_seqlens.shape[0] - 1
        if state is None:
            return self._forward(x, cu_seqlens, None)
        if self.sharded is not None:
            raise ValueError("state must be None if a sequence is sharded over processes; got one")
        self._check_state(state, sequences)
        wanted = recorded(x, *self.parameters())
        with torch.no_grad():
            y = self._forward(x, cu_seqlens, state)
        return without_backward((y,), wanted, NO_GRADIENT)[0]

    def make_state(self, batch: int, *, device: Any = None, dtype: torch.dtype | None = None) -> GatedDeltaState:
        """Returns the state of `batch` sequences before their first token.

        Args:
            device: None for the parameters' device.
            dtype: that of the convolution's inputs: the parameters' (None), or autocast's under autocast.
        """
        check_int("batch", batch, 0)
        weight = self.in_proj_qkv.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        channels = 2 * self.n_k_heads * self.head_k_dim + self.n_v_heads * self.head_v_dim
        shape = batch, self.n_v_heads, self.head_k_dim, self.head_v_dim
        return GatedDeltaState(
            torch.zeros(batch, channels, self.conv_size - 1, device=device, dtype=dtype),
            torch.zeros(shape, device=device, dtype=wide_dtype(dtype)),
        )

    def _check_state(self, state: GatedDeltaState, sequences: int) -> None:
        if not isinstance(state, GatedDeltaState):
            raise TypeError(f"state must be a GatedDeltaState; got {type(state).__name__}")
        channels = 2 * self.n_k_heads * self.head_k_dim + self.n_v_heads * self.head_v_dim
        check_shape("state.conv", state.conv, (sequences, channels, self.conv_size - 1), "sequences, C, W - 1")
        shape = sequences, self.n_v_heads, self.head_k_dim, self.head_v_dim
        check_shape("state.recurrent", state.recurrent, shape, "sequences, H_v, D_k, D_v")

    def _forward(self, x: Tensor, cu_seqlens: Tensor | None, state: GatedDeltaState | None) -> Tensor:
        layers = layers_for(x, self.backends["gated_delta_rule"])
        projections = self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a
        if (together := layers.together(x, *projections)) is None:
            qkv, z, b, a = layers.each(x, *projections)
        else:
            qkv, z, b, a = together.split([layer.out_features for layer in projections], -1)
        filters, backend = taps_of(self.conv1d.weight), self.backends["short_conv1d"]
        # One token of each sequence.
        steps = state is not None and cu_seqlens is None and x.shape[1] == 1
        if state is None:
            convolve = short_conv1d if self.sharded is None else self.sharded.short_conv1d
            mixed = convolve(qkv, filters, None, "silu", cu_seqlens=cu_seqlens, backend=backend)
        elif steps:
            check_dtype("state.conv", state.conv, "the projection", qkv)
            mixed = short_conv1d_step(qkv.squeeze(1), state.conv, filters, None, "silu", backend=backend)
        else:
            mixed, conv = short_conv1d(
                qkv,
                filters,
                None,
                "silu",
                cu_seqlens=cu_seqlens,
                initial_state=state.conv,
                return_final_state=True,
                backend=backend,
            )
        a, b = a.transpose(1, 2), b.transpose(1, 2)
        gates = Gates(self.A_log, self.dt_bias, 2.0 if self.negative_eigenvalues else 1.0)
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
            if state is not None and final is not None:
                state.conv.copy_(conv)
                state.recurrent.copy_(final)
        y = gated_rms_norm(
            out,
            z.view(out.shape).to(out.dtype),
            self.norm.weight,
            self.norm.eps,
            round_before_weight=self.norm.round_before_weight,
            backend=self.backends["gated_rms_norm"],
        )
        return layers.linear(y.flatten(2), self.out_proj)

    def extra_repr(self) -> str:
        extra = ", negative_eigenvalues=True" if self.negative_eigenvalues else ""
        return (
            f"{self.dim}, n_v_heads={self.n_v_heads}, n_k_heads={self.n_k_heads}, head_k_dim={self.head_k_dim}, "
            f"head_v_dim={self.head_v_dim}, conv_size={self.conv_size}{extra}, backend={describe(self.backends)}"
        )


def _check_sizes(dim: int, n_v_heads: int, n_k_heads: int, head_k_dim: int, head_v_dim: int, conv_size: int) -> None:
    sizes = {"dim": math.inf, "n_v_heads": math.inf, "n_k_heads": math.inf, "head_k_dim": MAX_HEAD_DIM}
    limits = {**sizes, "head_v_dim": MAX_VALUE_DIM, "conv_size": MAX_TAPS}
    given = (dim, n_v_heads, n_k_heads, head_k_dim, head_v_dim, conv_size)
    for (name, most), value in zip(limits.items(), given, strict=True):
        check_int(name, value, 1)
        if value > most:
            raise ValueError(f"{name} must be at most {most}; got {value}")
    if n_v_heads % n_k_heads:
        raise ValueError(f"n_v_heads must be a multiple of n_k_heads={n_k_heads}; got {n_v_heads}")
