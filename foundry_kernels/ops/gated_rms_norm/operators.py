"""The autograd function around the two operators of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative

FWD = (
    "gated_rms_norm_fwd(Tensor x, Tensor gate, Tensor? weight, float eps, str activation, bool round_before_weight, "
    "bool save_rstd) -> (Tensor y, Tensor rstd)"
)
BWD = (
    "gated_rms_norm_bwd(Tensor dy, Tensor x, Tensor gate, Tensor? weight, Tensor rstd, str activation, "
    "bool round_before_weight, bool need_dx, bool need_dgate, bool need_dw) -> (Tensor dx, Tensor dgate, Tensor dw)"
)

#: The forward and the backward operator by the prefix of their names, which torch.compile can look up.
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def make_backend(prefix: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Tensor]:
    """The backend's function, from its operators, whose schemas are `FWD` and `BWD`."""
    _OPERATORS[prefix] = forward, backward

    def gated_rms_norm(
        x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: str, round_before_weight: bool
    ) -> Tensor:
        tensors = x, gate, weight
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            y: Tensor = apply(_GatedRMSNorm, prefix, *tensors, eps, activation, round_before_weight)
        else:
            y, _ = forward(*tensors, eps, activation, round_before_weight, False)
        return y

    return gated_rms_norm


class _GatedRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prefix: str, x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, activation: str, rounds: bool
    ) -> Tensor:
        ctx.prefix, ctx.options = prefix, (activation, rounds)
        y, rstd = _OPERATORS[prefix][0](x, gate, weight, eps, activation, rounds, True)
        ctx.save_for_backward(x, gate, weight, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        refuse_second_derivative("gated_rms_norm")
        needs = ctx.needs_input_grad[1:4]
        found = _OPERATORS[ctx.prefix][1](dy, *ctx.saved_tensors, *ctx.options, *needs)
        return None, *(d if need else None for d, need in zip(found, needs, strict=True)), None, None, None
