"""What layers of the gated delta rule compute between their projections, here and in patched models of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from foundry_kernels.core.autocast import autocast_dtype
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.gated_delta_rule import gated_delta_rule, gated_delta_rule_step
from foundry_kernels.ops.swiglu import swiglu

#: The operations of a layer besides the norm and the gate of its result.
DELTA_OPS = ("short_conv1d", "gated_delta_rule", "gated_delta_rule_step")


class ShardedDelta(Protocol):
    """The operations of a layer on sequences that are sharded over processes, which `fk.distributed.context_parallel`
    implements. They get this process's tokens and the `cu_seqlens` of the whole sequence, and take no state."""

    def short_conv1d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        *,
        cu_seqlens: Tensor | None,
        backend: str,
    ) -> Tensor: ...

    def gated_delta_rule(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        A_log: Tensor | None,
        dt_bias: Tensor | None,
        beta_limit: float,
        cu_seqlens: Tensor | None,
        qk_l2norm: bool,
        backend: str,
    ) -> Tensor: ...


class Gates(NamedTuple):
    """The gates of the decay and of the step size. Their inputs a, ``[B, H, T]`` or ``[B, H, T, D_k]``, and b, ``[B, H,
    T]``: the decay's logarithm is ``-exp(A_log) softplus(a + dt_bias)``, or a itself without `A_log`, and the step size
    ``limit * sigmoid(b)``."""

    A_log: Tensor | None
    dt_bias: Tensor | None
    limit: float = 1.0

    def options(self, a: Tensor, b: Tensor, v: Tensor) -> dict[str, Any]:
        """What the rule takes for values v."""
        return {
            "g": _allowed(a, v),
            "beta": _allowed(b, v),
            "A_log": None if self.A_log is None else _allowed(self.A_log, v),
            "dt_bias": None if self.dt_bias is None else _allowed(self.dt_bias, v),
            "beta_limit": self.limit,
        }


def _allowed(x: Tensor, v: Tensor) -> Tensor:
    """x in v's dtype or in that of the arithmetic: a layer may hold others."""
    low = autocast_dtype(v)
    return x if x.dtype in (wide := wide_dtype(v.dtype), v.dtype if low is None else low) else x.to(wide)


def delta_rule_of(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    gates: Gates,
    heads: tuple[int, int],
    dims: tuple[int, int],
    backends: Mapping[str, str],
    *,
    cu_seqlens: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    sharded: ShardedDelta | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Runs the rule on the convolution's result ``[B, T, C]``, which holds queries, keys and values in this order.

    a, b: ``[B, H_v, T]``, or a ``[B, H_v, T, D_k]``. heads, dims: (H_k, H_v) and (D_k, D_v). sharded: how the rule runs
    if the sequence is sharded over processes; then there is no state.

    Returns:
        ``[B, T, H_v, D_v]``, contiguous, and the final state or None.
    """
    q, k, v = (x.transpose(1, 2) for x in _vectors(mixed, heads, dims))
    backend = backends["gated_delta_rule"]
    gated = gates.options(a, b, v)
    if sharded is not None:
        out = sharded.gated_delta_rule(q, k, v, **gated, cu_seqlens=cu_seqlens, qk_l2norm=True, backend=backend)
        return out.transpose(1, 2), None
    found = gated_delta_rule(
        q,
        k,
        v,
        **gated,
        initial_state=initial_state,
        return_final_state=return_final_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=True,
        backend=backend,
    )
    out, final = found if isinstance(found, tuple) else (found, None)
    return out.transpose(1, 2), final


def delta_rule_step_of(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    gates: Gates,
    heads: tuple[int, int],
    dims: tuple[int, int],
    backends: Mapping[str, str],
    state: Tensor,
) -> Tensor:
    """`delta_rule_of` for one token of each sequence, whose state is overwritten, without gradients: mixed ``[B, C]``,
    a and b with T = 1, result ``[B, 1, H_v, D_v]``."""
    q, k, v = _vectors(mixed, heads, dims)
    backend = backends["gated_delta_rule_step"]
    gated = gates.options(a.squeeze(2), b.squeeze(2), v)
    out = gated_delta_rule_step(q, k, v, state=state, **gated, qk_l2norm=True, backend=backend)
    return out.unsqueeze(1)


def _vectors(mixed: Tensor, heads: tuple[int, int], dims: tuple[int, int]) -> tuple[Tensor, ...]:
    """Queries, keys and values ``[..., H, D]`` of ``[..., C]``."""
    (k_heads, v_heads), (k_dim, v_dim) = heads, dims
    q, k, v = mixed.split((k_heads * k_dim, k_heads * k_dim, v_heads * v_dim), -1)
    # `unflatten` is a method in Python, which takes as long as two operators.
    rows = mixed.shape[:-1]
    return q.view(*rows, k_heads, k_dim), k.view(*rows, k_heads, k_dim), v.view(*rows, v_heads, v_dim)


def gated(normed: Tensor, gate: Tensor, dtype: torch.dtype, backend: str) -> Tensor:
    """Returns ``normed * silu(gate)`` of `dtype`. A norm with a weight of higher precision gives that precision, in
    which the product is then computed, as in transformers."""
    wide = torch.promote_types(normed.dtype, gate.dtype)
    return swiglu(gate.to(wide), normed.to(wide), backend=backend).to(dtype)


def taps_of(weight: Tensor) -> Tensor:
    """The filters ``[C, W]`` of the weight ``[C, 1, W]`` of a ``torch.nn.Conv1d`` with a group for each channel."""
    return weight.squeeze(1) if weight.dim() == 3 else weight


def continues_in_place(*tensors: Tensor | None) -> bool:
    """Whether a step may overwrite its state: nothing needs a gradient."""
    return not torch.is_grad_enabled() or not any(x is not None and x.requires_grad for x in tensors)
