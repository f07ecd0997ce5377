"""LayerNorm: the operators over the kernels of RMSNorm, and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels._triton.operators import apply, define, requires_grad
from foundry_kernels._triton.rows import empty_like
from foundry_kernels.core.dropout import NO_DROPOUT, DropoutOptions
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.ops.rms_norm.options import PLAIN_WEIGHT
from foundry_kernels.ops.rms_norm.triton.launch import (
    Backward,
    Forward,
    backward,
    empty_backward,
    empty_forward,
    forward,
)


def _empty_fwd(x: Tensor, residual: Tensor | None, save_stats: bool) -> Forward:
    return empty_forward(x, residual, x.dtype, save_mean=save_stats, save_rstd=save_stats)


def _fwd(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, save_stats: bool,
    dropout: DropoutOptions,
) -> Forward:  # fmt: skip
    results = _empty_fwd(x, residual, save_stats)
    forward(x, residual, weight, bias, eps, PLAIN_WEIGHT, dropout, results, centered=True)
    return results


def _bwd(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool,
) -> Backward:  # fmt: skip
    results = empty_backward(x, weight, bias, need_dx, need_dw, need_db)
    backward(dy, dh, x, weight, mean, rstd, PLAIN_WEIGHT, results, centered=True)
    return results


#: (dx, dresidual, dw, db), with None for gradients that are not requested.
_DropoutBackward = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _empty_dropout_bwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, need_dx: bool, need_dw: bool, need_db: bool
) -> _DropoutBackward:
    dx, dw, db = empty_backward(x, weight, bias, need_dx, need_dw, need_db)
    return dx, empty_like(x) if need_dx else None, dw, db


def _dropout_bwd(
    dy: Tensor, dh: Tensor | None, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor,
    need_dx: bool, need_dw: bool, need_db: bool, dropout_p: float, dropout_seed: Tensor,
) -> _DropoutBackward:  # fmt: skip
    dx, dw, db = results = empty_backward(x, weight, bias, need_dx, need_dw, need_db)
    dresidual, dropout = empty_like(x) if need_dx else None, DropoutOptions(dropout_p, dropout_seed)
    backward(dy, dh, x, weight, mean, rstd, PLAIN_WEIGHT, results, dropout, dresidual, centered=True)
    return dx, dresidual, dw, db


_layer_norm_fwd = define(
    "triton_layer_norm_fwd(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool save_stats, "
    f"{DropoutOptions.SCHEMA}) -> (Tensor y, Tensor h, Tensor mean, Tensor rstd)",
    _fwd,
    _empty_fwd,
    DropoutOptions,
)
_layer_norm_bwd = define(
    "triton_layer_norm_bwd(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, Tensor rstd, "
    "bool need_dx, bool need_dw, bool need_db) -> (Tensor dx, Tensor dw, Tensor db)",
    _bwd,
    empty_backward,
)
_layer_norm_dropout_bwd = define(
    "triton_layer_norm_dropout_bwd(Tensor dy, Tensor? dh, Tensor x, Tensor? weight, Tensor? bias, Tensor mean, "
    "Tensor rstd, bool need_dx, bool need_dw, bool need_db, float dropout_p, Tensor dropout_seed) "
    "-> (Tensor dx, Tensor dresidual, Tensor dw, Tensor db)",
    _dropout_bwd,
    _empty_dropout_bwd,
)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        dropout: DropoutOptions,
    ) -> Any:
        ctx.set_materialize_grads(False)  # as in _RMSNorm
        y, h, mean, rstd = _layer_norm_fwd(x, residual, weight, bias, eps, True, dropout)
        ctx.save_for_backward(x if residual is None else h, weight, bias, mean, rstd, dropout.dropout_seed)
        ctx.dropout_p = dropout.dropout_p
        if residual is not None and not (x.requires_grad or residual.requires_grad):
            ctx.mark_non_differentiable(h)
        return y if residual is None else (y, h)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None = None) -> Any:
        refuse_second_derivative("layer_norm")
        x, weight, bias, mean, rstd, seed = ctx.saved_tensors
        need_x, need_residual, need_dw, need_db, *_ = ctx.needs_input_grad
        need_dx = need_x or need_residual
        dx, dres, dw, db = dh, dh, None, None  # only the sum has a gradient
        if seed is not None:
            need_dw, need_db = need_dw and dy is not None, need_db and dy is not None
            dy = torch.zeros_like(x) if dy is None else dy
            saved = x, weight, bias, mean, rstd
            needs = need_dx, need_dw, need_db
            dx, dres, dw, db = _layer_norm_dropout_bwd(dy, dh, *saved, *needs, ctx.dropout_p, seed)
        elif dy is not None:
            dx, dw, db = _layer_norm_bwd(dy, dh, x, weight, bias, mean, rstd, need_dx, need_dw, need_db)
            dres = dx  # both terms of the sum have the same gradient
        return (
            dx if need_x else None,
            dres if need_residual else None,
            dw if need_dw else None,
            db if need_db else None,
            None,
            None,
        )


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if requires_grad(x, weight, bias):
        return apply(_LayerNorm, x, None, weight, bias, eps, NO_DROPOUT)
    return _layer_norm_fwd(x, None, weight, bias, eps, False, NO_DROPOUT)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *dropout_options: Any
) -> tuple[Tensor, Tensor]:
    dropout = DropoutOptions(*dropout_options)
    if requires_grad(x, residual, weight, bias):
        return apply(_LayerNorm, x, residual, weight, bias, eps, dropout)
    y, h, _, _ = _layer_norm_fwd(x, residual, weight, bias, eps, False, dropout)
    return y, h
