"""The autograd function around the two operators of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative

_INPUTS = "Tensor x, Tensor weight, Tensor? bias, str activation, Tensor? cu_seqlens, Tensor? initial_state, "
FWD = f"short_conv1d_fwd({_INPUTS}Tensor? residual, bool need_state) -> (Tensor y, Tensor final_state)"
BWD = (
    f"short_conv1d_bwd(Tensor dy, Tensor? dfinal_state, {_INPUTS}bool need_dx, bool need_dweight, bool need_dbias, "
    "bool need_dinitial_state) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)"
)
STEP = (
    "short_conv1d_step(Tensor x, Tensor(a!) state, Tensor weight, Tensor? bias, str activation, Tensor? residual) "
    "-> Tensor"
)

#: The forward and the backward operator by the prefix of their names, which torch.compile can look up.
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def make_backend(
    prefix: str, forward: Callable[..., Any], backward: Callable[..., Any]
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The backend's function, from its operators, whose schemas are `FWD` and `BWD`."""
    _OPERATORS[prefix] = forward, backward

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
        given = (x, weight, bias, activation, cu_seqlens, initial_state, residual, return_final_state)
        tensors = (x, weight, bias, initial_state, residual)
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors):
            y, final_state = apply(_ShortConv1d, prefix, *given)
        else:
            y, final_state = forward(*given)
        return y, final_state if return_final_state else None

    return short_conv1d


class _ShortConv1d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        prefix: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        cu_seqlens: Tensor | None,
        initial_state: Tensor | None,
        residual: Tensor | None,
        return_final_state: bool,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.prefix, ctx.activation, ctx.returns_state = prefix, activation, return_final_state
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, cu_seqlens, initial_state)
        y, final_state = _OPERATORS[prefix][0](
            x, weight, bias, activation, cu_seqlens, initial_state, residual, return_final_state
        )
        if return_final_state and not (x.requires_grad or (initial_state is not None and initial_state.requires_grad)):
            ctx.mark_non_differentiable(final_state)
        return y, final_state

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dfinal_state: Tensor | None) -> Any:
        refuse_second_derivative("short_conv1d")
        x, weight, bias, cu_seqlens, initial_state = ctx.saved_tensors
        _, need_dx, need_dweight, need_dbias, _, _, need_dinitial_state, _, _ = needed = ctx.needs_input_grad
        needs = need_dx, need_dweight, need_dbias, need_dinitial_state
        dx = dweight = dbias = dinitial_state = None
        if any(needs):
            dx, dweight, dbias, dinitial_state = _OPERATORS[ctx.prefix][1](
                torch.zeros_like(x) if dy is None else dy,
                dfinal_state if ctx.returns_state else None,  # torch.compile materializes it
                x, weight, bias, ctx.activation, cu_seqlens, initial_state, *needs,
            )  # fmt: skip
        dresidual = None if dy is None or not needed[7] else dy.clone(memory_format=torch.contiguous_format)
        found = (None, dx, dweight, dbias, None, None, dinitial_state, dresidual, None)
        return tuple(gradient if need else None for gradient, need in zip(found, needed, strict=True))
