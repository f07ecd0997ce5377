"""What the layers of linear attention have in common: sizes, states, and calls that continue them."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from foundry_kernels.core.checks import (
    check_dtype,
    check_int,
    check_integer,
    check_rank,
    check_shape,
    check_tensor,
)
from foundry_kernels.core.inference import recorded, without_backward
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.nn._backend import Backend, plan
from foundry_kernels.nn._delta import ShardedDelta
from foundry_kernels.nn._paged import NO_GRADIENT
from foundry_kernels.nn._scripting import refuse_scripting
from foundry_kernels.ops.gated_delta_rule.checks import MAX_HEAD_DIM, MAX_VALUE_DIM
from foundry_kernels.ops.short_conv1d import MAX_TAPS, short_conv1d, short_conv1d_step


class GatedDeltaState(NamedTuple):
    """What a layer of linear attention keeps of N sequences so far. Calls overwrite both tensors.

    The layer is a :class:`GatedDeltaNet`, a :class:`KimiDeltaAttention`, or a :class:`Mamba2` with n_heads heads of
    values, n_groups heads of keys of the width state_dim, and values of the width head_dim.

    conv: ``[N, C, conv_size - 1]``, the last inputs of the convolution, the newest last, in their dtype. recurrent:
    ``[N, n_v_heads, head_k_dim, head_v_dim]`` float32 (float64), the states of the recurrence. Zeros are the state
    before the first token.
    """

    conv: Tensor
    recurrent: Tensor

    def reset(self) -> None:
        """Makes it the state before the first token again."""
        self.conv.zero_()
        self.recurrent.zero_()


class LinearMixer(torch.nn.Module):
    """A layer of linear attention: projections, a short convolution, a recurrence, and a projection.

    A subclass computes in `_forward`.

    Attributes:
        sizes: heads of values, heads of keys, and their widths D_k and D_v.
        channels: C, those of the convolution.
        sharded: the operations on sequences that are sharded over processes, or None.
    """

    __prepare_scriptable__ = refuse_scripting

    #: The operations that it runs.
    OPS: ClassVar[tuple[str, ...]]
    #: The matmuls of a token with the state of a head.
    PRODUCTS: ClassVar[int]
    #: Whether it may round before its norm's weight multiplies (`norm_round_before_weight`).
    ROUNDS: ClassVar[bool] = True

    def __init__(self, dim: int, conv_size: int, backend: Backend, **sizes: int) -> None:
        """sizes: heads of values, heads of keys and their widths D_k and D_v, in this order, by the subclass's
        names."""
        super().__init__()
        v_heads, k_heads = _check_sizes(dim, conv_size, sizes)
        if sizes[v_heads] % sizes[k_heads]:
            raise ValueError(f"{v_heads} must be a multiple of {k_heads}={sizes[k_heads]}; got {sizes[v_heads]}")
        self.backends = plan(backend, self.OPS)
        self.dim, self.conv_size = dim, conv_size
        self.sizes = n_v, n_k, k_dim, v_dim = tuple(sizes.values())
        self.channels = 2 * n_k * k_dim + n_v * v_dim
        self.sharded: ShardedDelta | None = None

    def _filters(self, bias: bool = False, **factory: Any) -> torch.nn.Conv1d:
        """Returns what holds the filters of the convolution."""
        n, taps = self.channels, self.conv_size
        return torch.nn.Conv1d(n, n, taps, padding=taps - 1, groups=n, bias=bias, **factory)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        raise NotImplementedError

    @property
    def output_projection(self) -> torch.nn.Linear:
        """The projection whose result is added to the residual stream."""
        return self.out_proj  # type: ignore[return-value]

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
        weight = self.output_projection.weight
        device, dtype = device or weight.device, dtype or weight.dtype
        v_heads, _, k_dim, v_dim = self.sizes
        return GatedDeltaState(
            torch.zeros(batch, self.channels, self.conv_size - 1, device=device, dtype=dtype),
            torch.zeros(batch, v_heads, k_dim, v_dim, device=device, dtype=wide_dtype(dtype)),
        )

    def _check_state(self, state: GatedDeltaState, sequences: int) -> None:
        if not isinstance(state, GatedDeltaState):
            raise TypeError(f"state must be a GatedDeltaState; got {type(state).__name__}")
        check_shape("state.conv", state.conv, (sequences, self.channels, self.conv_size - 1), "sequences, C, W - 1")
        v_heads, _, k_dim, v_dim = self.sizes
        check_shape("state.recurrent", state.recurrent, (sequences, v_heads, k_dim, v_dim), "sequences, H_v, D_k, D_v")

    def _forward(self, x: Tensor, cu_seqlens: Tensor | None, state: GatedDeltaState | None) -> Tensor:
        raise NotImplementedError

    def _convolved(
        self, x: Tensor, taps: Tensor, bias: Tensor | None, cu_seqlens: Tensor | None, state: GatedDeltaState | None
    ) -> tuple[Tensor, Tensor | None, bool]:
        """The activated convolution of x ``[B, T, C]``; its inputs that the state must keep, or None if there is no
        state or it has them already; and whether x is one token of each sequence, whose result is ``[B, C]``."""
        backend = self.backends["short_conv1d"]
        if state is None:
            convolve = short_conv1d if self.sharded is None else self.sharded.short_conv1d
            return convolve(x, taps, bias, "silu", cu_seqlens=cu_seqlens, backend=backend), None, False
        if cu_seqlens is None and x.shape[1] == 1:
            check_dtype("state.conv", state.conv, "the projection", x)
            return short_conv1d_step(x.squeeze(1), state.conv, taps, bias, "silu", backend=backend), None, True
        mixed, conv = short_conv1d(
            x,
            taps,
            bias,
            "silu",
            cu_seqlens=cu_seqlens,
            initial_state=state.conv,
            return_final_state=True,
            backend=backend,
        )
        return mixed, conv, False


def _check_sizes(dim: int, conv_size: int, sizes: dict[str, int]) -> tuple[str, str]:
    """Returns the names of the numbers of heads."""
    v_heads, k_heads, k_dim, v_dim = sizes
    limits = {"dim": math.inf, v_heads: math.inf, k_heads: math.inf, k_dim: MAX_HEAD_DIM, v_dim: MAX_VALUE_DIM}
    for name, value in {"dim": dim, **sizes, "conv_size": conv_size}.items():
        check_int(name, value, 1)
        if value > (most := limits.get(name, MAX_TAPS)):
            raise ValueError(f"{name} must be at most {most}; got {value}")
    return v_heads, k_heads
