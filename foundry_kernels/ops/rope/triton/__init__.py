"""`rope` and `qk_norm_rope` in Triton: operators and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foundry_kernels._triton.operators import apply, define, requires_grad
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import empty_like
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.layout import dense_strides, inverse, order_of, storage_order
from foundry_kernels.ops.rms_norm.options import WeightOptions
from foundry_kernels.ops.rope.options import RopeOptions
from foundry_kernels.ops.rope.triton.launch import Norms, launch_backward, launch_forward, unit_stride

_AS_THEY_ARE = [0, 1, 2, 3]


def _dense(x: Tensor, order: list[int] | None) -> Tensor:
    """An uninitialized tensor of x's shape and dtype, dense, with its dimensions in this order (default: x's own
    order)."""
    if (order is None or order == _AS_THEY_ARE) and x.is_contiguous():
        return empty_like(x)
    strides = _dense_strides(x.shape, x.stride(), None if order is None else tuple(order))
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device)


@planned
def _dense_strides(shape: tuple[int, ...], strides: tuple[int, ...], order: tuple[int, ...] | None) -> tuple[int, ...]:
    if order is None:
        order = tuple(range(len(shape)) if 0 in shape else order_of(shape, strides))
    return dense_strides(shape, order)


def _dense_fake(x: Tensor, order: list[int] | None) -> Tensor:
    """Does the same as `_dense`, for sizes that may be symbolic."""
    order = storage_order(x) if order is None else order
    return torch.empty([x.shape[d] for d in order], dtype=x.dtype, device=x.device).permute(inverse(order))


Dense = Callable[[Tensor, list[int] | None], Tensor]

# --- rope -----------------------------------------------------------------------------------------------------------


def _empty_rope(
    q: Tensor | None,
    k: Tensor | None,
    q_order: list[int] | None = None,
    k_order: list[int] | None = None,
    dense: Dense = _dense,
) -> tuple[Tensor | None, Tensor | None]:
    return None if q is None else dense(q, q_order), None if k is None else dense(k, k_order)


def _apply(
    q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, options: RopeOptions, inverse: bool,
    q_order: list[int] | None = None, k_order: list[int] | None = None,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    q_out, k_out = _empty_rope(q, k, q_order, k_order)
    launch_forward(q, k, q_out, k_out, cos, sin, options, inverse=inverse)
    return q_out, k_out


_rope_apply = define(
    f"triton_rope_apply(Tensor? q, Tensor? k, Tensor cos, Tensor sin, {RopeOptions.SCHEMA}, bool inverse, "
    "int[]? q_order=None, int[]? k_order=None) -> (Tensor q_out, Tensor k_out)",
    _apply,
    partial(_empty_rope, dense=_dense_fake),
    RopeOptions,
)


#: The gradients of cos and what follows it in the arguments of `_Rope.forward`.
_ROPE_REST = None, None, None


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, options: RopeOptions) -> Any:
        ctx.set_materialize_grads(False)  # zeros would cost a pass, and would not be DTensors where the outputs are
        ctx.q_order, ctx.k_order, ctx.interleaved = storage_order(q), storage_order(k), options.interleaved
        ctx.save_for_backward(cos, sin, options.positions)
        q_out, k_out = _rope_apply(q, k, cos, sin, options, False, ctx.q_order, ctx.k_order)
        if not (q.requires_grad and k.requires_grad):
            ctx.mark_non_differentiable(q_out if not q.requires_grad else k_out)
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> Any:
        refuse_second_derivative("rope")
        need_dq, need_dk, *_ = ctx.needs_input_grad
        dq_out, dk_out = dq_out if need_dq else None, dk_out if need_dk else None
        if dq_out is None and dk_out is None:
            return None, None, *_ROPE_REST
        cos, sin, positions = ctx.saved_tensors
        options = RopeOptions(ctx.interleaved, positions)
        if dq_out is None:  # the first tensor must not be None: DTensor in torch 2.11 takes the mesh from it
            dk, _ = _rope_apply(dk_out, None, cos, sin, options, True, ctx.k_order, ctx.q_order)
            return None, dk, *_ROPE_REST
        dq, dk = _rope_apply(dq_out, dk_out, cos, sin, options, True, ctx.q_order, ctx.k_order)
        return dq, None if dk_out is None else dk, *_ROPE_REST


# --- qk_norm_rope ---------------------------------------------------------------------------------------------------


def _empty_rstd(x: Tensor) -> Tensor:
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    return torch.empty(x.shape[:-1], dtype=compute, device=x.device)


Results = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _empty_fwd(q: Tensor, k: Tensor, save_q_rstd: bool, save_k_rstd: bool, dense: Dense = _dense) -> Results:
    q_out, k_out = _empty_rope(q, k, dense=dense)
    return q_out, k_out, _empty_rstd(q) if save_q_rstd else None, _empty_rstd(k) if save_k_rstd else None


def _fwd(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float,
    weight_options: WeightOptions, options: RopeOptions, save_q_rstd: bool, save_k_rstd: bool,
) -> Results:  # fmt: skip
    q_out, k_out, q_rstd, k_rstd = _empty_fwd(q, k, save_q_rstd, save_k_rstd)
    norms = Norms(unit_stride(q_weight), unit_stride(k_weight), q_rstd, k_rstd, eps, weight_options)
    launch_forward(q, k, q_out, k_out, cos, sin, options, norms=norms)
    return q_out, k_out, q_rstd, k_rstd


def _empty_bwd(
    q: Tensor | None,
    k: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    need_dq: bool,
    need_dk: bool,
    need_dq_weight: bool,
    need_dk_weight: bool,
    dense: Dense = _dense,
) -> Results:
    return (
        dense(q, None) if need_dq and q is not None else None,
        dense(k, None) if need_dk and k is not None else None,
        empty_like(q_weight) if need_dq_weight and q_weight is not None else None,
        empty_like(k_weight) if need_dk_weight and k_weight is not None else None,
    )


def _bwd(
    dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor | None, k: Tensor | None,
    q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor,
    q_rstd: Tensor | None, k_rstd: Tensor | None, weight_options: WeightOptions, options: RopeOptions,
    need_dq: bool, need_dk: bool, need_dq_weight: bool, need_dk_weight: bool,
) -> Results:  # fmt: skip
    """`dq_out`, q and its rstd are None if no gradient of q is needed; the same applies to k."""
    gradients = _empty_bwd(q, k, q_weight, k_weight, need_dq, need_dk, need_dq_weight, need_dk_weight)
    if all(x is None or x.numel() == 0 for x in (q, k)):
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
        return gradients
    launch_backward(
        dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd, weight_options, options, *gradients
    )
    return gradients


_qk_norm_rope_fwd = define(
    "triton_qk_norm_rope_fwd(Tensor q, Tensor k, Tensor? q_weight, Tensor? k_weight, Tensor cos, Tensor sin, "
    f"float eps, {WeightOptions.SCHEMA}, {RopeOptions.SCHEMA}, bool save_q_rstd, bool save_k_rstd) "
    "-> (Tensor q_out, Tensor k_out, Tensor q_rstd, Tensor k_rstd)",
    _fwd,
    partial(_empty_fwd, dense=_dense_fake),
    WeightOptions,
    RopeOptions,
)
_qk_norm_rope_bwd = define(
    "triton_qk_norm_rope_bwd(Tensor? dq_out, Tensor? dk_out, Tensor? q, Tensor? k, Tensor? q_weight, "
    "Tensor? k_weight, Tensor cos, Tensor sin, Tensor? q_rstd, Tensor? k_rstd, "
    f"{WeightOptions.SCHEMA}, {RopeOptions.SCHEMA}, bool need_dq, bool need_dk, "
    "bool need_dq_weight, bool need_dk_weight) -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
    _bwd,
    partial(_empty_bwd, dense=_dense_fake),
    WeightOptions,
    RopeOptions,
)


def _qk_norm_rope_gradients(
    q: Tensor | None = None,
    k: Tensor | None = None,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Returns the gradients in the order of `_QKNormRope.forward`; cos and what follows it have none."""
    cos = sin = eps = weight_options = options = None
    return q, k, q_weight, k_weight, cos, sin, eps, weight_options, options


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        eps: float,
        weight_options: WeightOptions,
        options: RopeOptions,
    ) -> Any:
        ctx.set_materialize_grads(False)
        need_dq, need_dk, need_dq_weight, need_dk_weight, *_ = ctx.needs_input_grad
        save_q, save_k = need_dq or need_dq_weight, need_dk or need_dk_weight
        q_out, k_out, q_rstd, k_rstd = _qk_norm_rope_fwd(
            q, k, q_weight, k_weight, cos, sin, eps, weight_options, options, save_q, save_k
        )
        of_q = (q, q_weight, q_rstd) if save_q else (None, None, None)
        of_k = (k, k_weight, k_rstd) if save_k else (None, None, None)
        ctx.save_for_backward(*of_q, *of_k, cos, sin, options.positions)
        ctx.weight_options, ctx.interleaved = weight_options, options.interleaved
        ctx.mark_non_differentiable(*(out for out, saved in ((q_out, save_q), (k_out, save_k)) if not saved))
        return q_out, k_out

    @staticmethod
    def backward(ctx: Any, dq_out: Tensor | None, dk_out: Tensor | None) -> Any:
        refuse_second_derivative("qk_norm_rope")
        q, q_weight, q_rstd, k, k_weight, k_rstd, cos, sin, positions = ctx.saved_tensors
        need_dq, need_dk, need_dq_weight, need_dk_weight, *_ = ctx.needs_input_grad
        # q or k is left out if nothing was saved for it or its result was not used.
        if dq_out is None or q is None:
            dq_out = q = q_weight = q_rstd = None
            need_dq = need_dq_weight = False
        if dk_out is None or k is None:
            dk_out = k = k_weight = k_rstd = None
            need_dk = need_dk_weight = False
        if q is None and k is None:
            return _qk_norm_rope_gradients()
        options = ctx.weight_options, RopeOptions(ctx.interleaved, positions)
        if q is None:  # as in `_Rope`
            dk, _, dk_weight, _ = _qk_norm_rope_bwd(
                dk_out, None, k, None, k_weight, None, cos, sin, k_rstd, None, *options,
                need_dk, False, need_dk_weight, False,
            )  # fmt: skip
            return _qk_norm_rope_gradients(k=dk if need_dk else None, k_weight=dk_weight if need_dk_weight else None)
        dq, dk, dq_weight, dk_weight = _qk_norm_rope_bwd(
            dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd, *options,
            need_dq, need_dk, need_dq_weight, need_dk_weight,
        )  # fmt: skip
        return _qk_norm_rope_gradients(
            dq if need_dq else None,
            dk if need_dk else None,
            dq_weight if need_dq_weight else None,
            dk_weight if need_dk_weight else None,
        )


# --- backends of the public functions -------------------------------------------------------------------------------


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, positions: Tensor | None
) -> tuple[Tensor, Tensor]:
    options = RopeOptions(interleaved, positions)
    if requires_grad(q, k):
        return apply(_Rope, q, k, cos, sin, options)
    return _rope_apply(q, k, cos, sin, options, False)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    interleaved: bool,
    positions: Tensor | None,
) -> tuple[Tensor, Tensor]:
    weight_options, options = WeightOptions(weight_offset, round_before_weight), RopeOptions(interleaved, positions)
    if requires_grad(q, k, q_weight, k_weight):
        return apply(_QKNormRope, q, k, q_weight, k_weight, cos, sin, eps, weight_options, options)
    return _qk_norm_rope_fwd(q, k, q_weight, k_weight, cos, sin, eps, weight_options, options, False, False)[:2]
