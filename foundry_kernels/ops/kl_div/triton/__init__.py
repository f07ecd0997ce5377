"""Divergences in Triton: a program takes a row, or several of a small vocabulary, and walks over blocks of the classes
two or three times. After the first time the logits come from the L2 cache, if its programs' rows fit there."""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.launch import Plan, launch
from foundry_kernels._triton.operators import apply, define
from foundry_kernels._triton.plans import planned
from foundry_kernels._triton.rows import compute_dtype, contiguous, row_strides
from foundry_kernels._triton.tuning import choose
from foundry_kernels.core.inference import refuse_second_derivative
from foundry_kernels.core.registry import wide_dtype
from foundry_kernels.ops.cross_entropy.triton import configs
from foundry_kernels.ops.kl_div.options import KlDivOptions
from foundry_kernels.ops.kl_div.triton.kernels import kl_div_kernel

_TILE, _EACH = 4096, 8  # elements of a program's tile; of each thread: there are two tensors, and 16 take 80 registers
#: With loss and gradients ptxas spills 8 bytes otherwise, on 9.0 or 12.0, for an occupancy that it guesses; of the
#: Jensen-Shannon divergence only if rows are not aligned; of the total variation then without gradients too.
_ENOUGH, _ENOUGH_JSD = {"maxnreg": 64}, {"maxnreg": 128}


@planned
def _plan(
    shape: tuple[int, ...], strides: tuple[int, ...], teacher_strides: tuple[int, ...], dtype: torch.dtype,
    device: torch.device, options: KlDivOptions, both: bool,
) -> Plan | None:  # fmt: skip
    """None if the kernel does not support this layout."""
    layout = row_strides(shape, strides, teacher_strides)
    if layout is None:
        return None
    rank, n1, n2, (of_rows, of_teacher) = layout
    n_rows, n_cols = math.prod(shape[:-1]), shape[-1]
    block = choose("kl_div_kernel", f"{8 * dtype.itemsize}-bit", configs(n_cols, _TILE, _EACH), device)
    caps = options.softcap, options.teacher_softcap
    constants = {"RANK": rank, "DIVERGENCE": options.direction, "COMPUTE": compute_dtype(dtype)}
    constants |= {"CAP": caps[0] is not None, "TEACHER_CAP": caps[1] is not None}
    aligned = n_cols * dtype.itemsize % 16 == 0
    if block["num_warps"] == 16 and (both or (options.direction == "tvd" and not aligned)):
        if options.direction != "jsd":
            constants |= _ENOUGH
        elif not aligned:
            constants |= _ENOUGH_JSD
    numbers = (n_rows, n_cols, n1, n2, *of_rows, *of_teacher, options.ignore_index)
    of_caps = ((cap or 1.0) / options.temperature for cap in caps)
    of_options = (1.0 / options.temperature, *of_caps, options.beta, 1.0 - options.beta)
    return Plan((triton.cdiv(n_rows, block["BLOCK_ROWS"]),), (*numbers, *of_options), constants | block)


def rows(
    logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions, dloss: Tensor | None,
    dlogits: Tensor | None, loss: Tensor | None,
) -> None:  # fmt: skip
    """Writes each row's loss to `loss` and, with the gradients `dloss` of the losses, that of the logits to `dlogits`,
    which may be the logits if they are contiguous."""
    if logits.numel() == 0:
        return
    both = dloss is not None and loss is not None
    plan = _plan(
        logits.shape, logits.stride(), teacher_logits.stride(), logits.dtype, logits.device, options, both
    )  # fmt: skip
    if plan is None:
        return rows(logits.contiguous(), teacher_logits.contiguous(), target, options, dloss, dlogits, loss)
    launch(kl_div_kernel, plan, logits, teacher_logits, target.contiguous(), contiguous(dloss), loss, dlogits)


def _losses(logits: Tensor, target: Tensor) -> Tensor:
    return torch.empty(target.shape, dtype=wide_dtype(logits.dtype), device=logits.device)


def _gradient(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def _fwd(logits: Tensor, teacher_logits: Tensor, target: Tensor, *args: Any) -> Tensor:
    loss = _losses(logits, target)
    rows(logits, teacher_logits, target, KlDivOptions(*args), None, None, loss)
    return loss


def _bwd(dloss: Tensor, logits: Tensor, teacher_logits: Tensor, target: Tensor, *args: Any) -> Tensor:
    dlogits = _gradient(logits)
    rows(logits, teacher_logits, target, KlDivOptions(*args), dloss, dlogits, None)
    return dlogits


def fwd_bwd_(
    logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions, dloss: Tensor | None
) -> Tensor:
    """Each row's loss; with the gradients `dloss` of the losses, contiguous logits become their own gradient."""
    loss = _losses(logits, target)
    rows(logits, teacher_logits, target, options, dloss, None if dloss is None else logits, loss)
    return loss


_INPUTS = f"Tensor logits, Tensor teacher_logits, Tensor target, {KlDivOptions.SCHEMA}"
_kl_div_fwd = define(
    f"triton_kl_div_fwd({_INPUTS}) -> Tensor loss", _fwd, lambda logits, teacher, target, *_: _losses(logits, target)
)
_kl_div_bwd = define(
    f"triton_kl_div_bwd(Tensor dloss, {_INPUTS}) -> Tensor dlogits", _bwd, lambda dloss, logits, *_: _gradient(logits)
)


class _KlDiv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions) -> Tensor:
        ctx.options = options.operator_args()
        ctx.save_for_backward(logits, teacher_logits, target)
        return _kl_div_fwd(logits, teacher_logits, target, *ctx.options)

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> Any:
        refuse_second_derivative("kl_div")
        return _kl_div_bwd(dloss, *ctx.saved_tensors, *ctx.options), None, None, None


def kl_div(logits: Tensor, teacher_logits: Tensor, target: Tensor, options: KlDivOptions) -> Tensor:
    if torch.is_grad_enabled() and logits.requires_grad:
        return apply(_KlDiv, logits, teacher_logits, target, options)
    return _kl_div_fwd(logits, teacher_logits, target, *options.operator_args())
