"""RMSNorm and LayerNorm in Triton: operators and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels._triton.operators import apply, define, requires_grad
from foundry_kernels._triton.rows import empty_like
from foundry_kernels.core.dropout import NO_DROPOUT, DropoutOptions
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.rms_norm.options import WeightOptions
from foundry_kernels.ops.rms_norm.triton.launch import backward, empty_backward, empty_forward, forward
from foundry_kernels.ops.rms_norm.triton.layer_norm import add_layer_norm, layer_norm

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


def _empty_fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, options: WeightOptions, save_rstd: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    promotes = options.round_before_weight and weight is not None
    y_dtype = torch.promote_types(x.dtype, weight.dtype) if promotes and weight is not None else x.dtype
    y, h, _, rstd = empty_forward(x, residual, y_dtype, save_mean=False, save_rstd=save_rstd)
    return y, h, rstd


def _fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, options: WeightOptions, save_rstd: bool,
    dropout: DropoutOptions,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    y, h, rstd = _empty_fwd(x, residual, weight, options, save_rstd)
    forward(x, residual, weight, None, eps, options, dropout, (y, h, None, rstd))
    return y, h, rstd


def _empty_bwd(x: Tensor, weight: Tensor | None, need_dx: bool, need_dw: bool) -> tuple[Tensor | None, Tensor | None]:
    return empty_backward(x, weight, None, need_dx, need_dw, False)[:2]


def _bwd(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, options: WeightOptions,
    need_dx: bool, need_dw: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    dx, dw, _ = results = empty_backward(x, weight, None, need_dx, need_dw, False)
    backward(dy, dh, x, weight, None, rstd, options, results)
    return dx, dw


def _empty_dropout_bwd(
    x: Tensor, weight: Tensor | None, need_dx: bool, need_dw: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dx, dw, _ = empty_backward(x, weight, None, need_dx, need_dw, False)
    return dx, empty_like(x) if need_dx else None, dw


def _dropout_bwd(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor, options: WeightOptions,
    need_dx: bool, need_dw: bool, dropout_p: float, dropout_seed: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    dx, dw, _ = results = empty_backward(x, weight, None, need_dx, need_dw, False)
    dresidual = empty_like(x) if need_dx else None
    backward(dy, dh, x, weight, None, rstd, options, results, DropoutOptions(dropout_p, dropout_seed), dresidual)
    return dx, dresidual, dw


_rms_norm_fwd = define(
    f"triton_rms_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, float eps, {WeightOptions.SCHEMA}, "
    f"bool save_rstd, {DropoutOptions.SCHEMA}) -> (Tensor y, Tensor h, Tensor rstd)",
    _fwd,
    _empty_fwd,
    WeightOptions,
    DropoutOptions,
)
_rms_norm_bwd = define(
    f"triton_rms_norm_bwd(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor rstd, {WeightOptions.SCHEMA}, "
    "bool need_dx, bool need_dw) -> (Tensor dx, Tensor dw)",
    _bwd,
    _empty_bwd,
    WeightOptions,
)
_rms_norm_dropout_bwd = define(
    "triton_rms_norm_dropout_bwd(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor rstd, "
    f"{WeightOptions.SCHEMA}, bool need_dx, bool need_dw, float dropout_p, Tensor dropout_seed) "
    "-> (Tensor dx, Tensor dresidual, Tensor dw)",
    _dropout_bwd,
    _empty_dropout_bwd,
    WeightOptions,
)


#: The gradients of eps and the options.
_REST = None, None, None


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        eps: float,
        options: WeightOptions,
        dropout: DropoutOptions,
    ) -> Any:
        ctx.set_materialize_grads(False)  # zeros would cost a pass, and would not be DTensors where the outputs are
        y, h, rstd = _rms_norm_fwd(x, residual, weight, eps, options, True, dropout)
        ctx.save_for_backward(x if residual is None else h, weight, rstd, dropout.dropout_seed)
        ctx.options, ctx.dropout_p, ctx.y_dtype = options, dropout.dropout_p, y.dtype
        if residual is not None and not (x.requires_grad or residual.requires_grad):
            ctx.mark_non_differentiable(h)
        return y if residual is None else (y, h)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None) -> Any:
        refuse_second_derivative("rms_norm")
        x, weight, rstd, seed = ctx.saved_tensors
        need_x, need_residual, need_dw, *_ = ctx.needs_input_grad
        need_dx = need_x or need_residual
        if seed is not None:
            need_dw = need_dw and dy is not None
            dy = torch.zeros_like(x, dtype=ctx.y_dtype) if dy is None else dy
            dx, dres, dw = _rms_norm_dropout_bwd(
                dy, dh, x, weight, rstd, ctx.options, need_dx, need_dw, ctx.dropout_p, seed
            )
            return dx if need_x else None, dres if need_residual else None, dw if need_dw else None, *_REST
        if dy is None:  # only the sum has a gradient, the weight has none
            return dh if need_x else None, dh if need_residual else None, None, *_REST
        dx, dw = _rms_norm_bwd(dy, dh, x, weight, rstd, ctx.options, need_dx, need_dw)
        # Both terms of the sum have the same gradient.
        return dx if need_x else None, dx if need_residual else None, dw if need_dw else None, *_REST


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, weight_offset: float, round_before_weight: bool) -> Tensor:
    options = WeightOptions(weight_offset, round_before_weight)
    if requires_grad(x, weight):
        return apply(_RMSNorm, x, None, weight, eps, options, NO_DROPOUT)
    return _rms_norm_fwd(x, None, weight, eps, options, False, NO_DROPOUT)[0]


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    *dropout_options: Any,
) -> tuple[Tensor, Tensor]:
    options, dropout = WeightOptions(weight_offset, round_before_weight), DropoutOptions(*dropout_options)
    if requires_grad(x, residual, weight):
        return apply(_RMSNorm, x, residual, weight, eps, options, dropout)
    y, h, _ = _rms_norm_fwd(x, residual, weight, eps, options, False, dropout)
    return y, h
