"""The autograd function around the two operators of a backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.autograd import apply
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.kl_div.options import KlDivOptions

_INPUTS = f"Tensor logits, Tensor teacher_logits, Tensor target, {KlDivOptions.SCHEMA}"
FWD = f"kl_div_fwd({_INPUTS}) -> Tensor loss"
BWD = f"kl_div_bwd(Tensor dloss, {_INPUTS}) -> Tensor dlogits"

#: The forward and the backward operator by the prefix of their names, which torch.compile can look up.
_OPERATORS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def make_backend(prefix: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Tensor]:
    """The backend's function, from its operators, whose schemas are `FWD` and `BWD`."""
    _OPERATORS[prefix] = forward, backward

    def kl_div(logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions) -> Tensor:
        if torch.is_grad_enabled() and logits.requires_grad:
            loss: Tensor = apply(_KlDiv, prefix, logits, teacher_logits, target, options)
            return loss
        return forward(logits, teacher_logits, target, *options.operator_args())

    return kl_div


class _KlDiv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, prefix: str, logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions
    ) -> Tensor:
        ctx.prefix, ctx.options = prefix, options.operator_args()
        ctx.save_for_backward(logits, teacher_logits, target)
        return _OPERATORS[prefix][0](logits, teacher_logits, target, *ctx.options)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        refuse_second_derivative("kl_div")
        return None, _OPERATORS[ctx.prefix][1](dloss, *ctx.saved_tensors, *ctx.options), None, None, None
