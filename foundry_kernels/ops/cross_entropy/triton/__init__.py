"""Cross-entropy in Triton.

Forward: a program takes a row, or several rows of a small vocabulary. It visits blocks of classes with a running
maximum and the sum of the exponentials relative to it. The sum excludes the target, so that the loss of a confident
token is exact (see the mathematics in `cross_entropy/__init__`). For a reduced loss, one more program sums over the
rows, always in the same order. Backward: element by element; each block reads its rows' results.
"""

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
from foundry_kernels.ops.cross_entropy.options import LossOptions
from foundry_kernels.ops.cross_entropy.triton.kernels import (
    cross_entropy_bwd_kernel,
    cross_entropy_fwd_kernel,
    cross_entropy_reduce_kernel,
)

_FORWARD, _BACKWARD, _SHARED = 4096, 2048, 512  # elements of a tile, 16 a thread; of a tile with several rows


def _tile(n_cols: int, elements: int, threads: int = 16) -> dict[str, int]:
    """A program's tile of `elements`, with `threads` of them for each thread. Rows of a small vocabulary share a tile.
    It does not depend on the number of rows, so that a row is summed in the same order in any batch."""
    cols = min(elements, triton.next_power_of_2(n_cols))
    rows = min(max(_SHARED // cols, 1), 32)
    tile = {"BLOCK_ROWS": rows, "BLOCK_COLS": cols, "num_warps": max(1, rows * cols // (32 * threads))}
    if tile["num_warps"] == 1:  # otherwise ptxas spills a few registers for an occupancy that is not needed
        tile["maxnreg"] = 168
    return tile


def configs(n_cols: int, elements: int, threads: int = 16) -> list[dict[str, int]]:
    """Returns launch configs: the tile of `elements`, `threads` (16 or 8) of them for each thread, then those that
    `python -m foundry_kernels tune` tries."""
    found: list[dict[str, int]] = []
    for size, each in ((1, threads), (1, 24 - threads), (2, 16), (0.5, 16), (0.5, 8), (2, 8)):
        tile = _tile(n_cols, int(size * elements), each)
        if tile not in found:
            found.append(tile)
    return found


def _choose(kernel: str, n_cols: int, elements: int, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    return choose(kernel, f"{8 * dtype.itemsize}-bit", configs(n_cols, elements), device)


def _sum_of(weight: Tensor | None, label_smoothing: float, dtype: torch.dtype) -> Tensor | None:
    return None if weight is None or label_smoothing == 0.0 else weight.to(dtype).sum()


def _empty_fwd(
    logits: Tensor, target: Tensor, reduction: str, save_lse: bool, save_z_loss: bool, save_stats: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    def empty(wanted: bool, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape if wanted else (0,), dtype=wide_dtype(logits.dtype), device=logits.device)

    rows, reduced = target.shape, target.shape if reduction == "none" else ()
    return (
        empty(True, reduced),
        empty(save_lse, rows),
        empty(save_stats, rows),
        empty(save_z_loss, reduced),
        empty(save_stats and reduction == "mean", ()),
    )


def _shared_arguments(
    layout: tuple[int, int, int, list[tuple[int, int, int]]], n_cols: int, dtype: torch.dtype, options: LossOptions
) -> tuple[tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """The numbers, from n1 on, and the constants that the forward and the backward kernel share."""
    rank, n1, n2, (strides,) = layout
    smoothing, softcap = options.label_smoothing, options.softcap
    share = smoothing / n_cols
    numbers = (n1, n2, *strides, options.ignore_index, smoothing, share, options.z_loss, softcap or 0.0)
    smooth, capped = smoothing > 0.0, softcap is not None
    return numbers, {"RANK": rank, "CAP": capped, "SMOOTH": smooth, "COMPUTE": compute_dtype(dtype)}


@planned
def _plan_fwd(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, options: LossOptions
) -> Plan | None:
    layout = row_strides(shape, strides)
    if layout is None:
        return None
    n_rows, n_cols = math.prod(shape[:-1]), shape[-1]
    block = _choose("cross_entropy_fwd_kernel", n_cols, _FORWARD, dtype, device)
    numbers, constants = _shared_arguments(layout, n_cols, dtype, options)
    grid = (triton.cdiv(n_rows, block["BLOCK_ROWS"]),)
    return Plan(grid, (n_rows, n_cols, *numbers), constants | block)


@planned
def _plan_reduce(n_rows: int, n_cols: int, dtype: torch.dtype, ignore_index: int, mean: bool) -> Plan:
    constants = {"MEAN": mean, "COMPUTE": compute_dtype(dtype), "BLOCK": min(1024, triton.next_power_of_2(n_rows))}
    return Plan((1,), (n_rows, n_cols, ignore_index), constants | {"num_warps": 4})


def _fwd(
    logits: Tensor, target: Tensor, weight: Tensor | None, *args: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    options, (save_lse, save_z_loss, save_stats) = LossOptions.from_operator_args(args)
    outputs = _empty_fwd(logits, target, options.reduction, save_lse, save_z_loss, save_stats)
    loss, lse, lse_low, z, total = outputs
    n_rows = target.numel()
    if n_rows == 0:
        for each in (loss, z, total):
            each.zero_()
        return outputs
    target, weight = target.contiguous(), contiguous(weight)
    plan = _plan_fwd(logits.shape, logits.stride(), logits.dtype, logits.device, options)
    if plan is None:
        return _fwd(logits.contiguous(), target, weight, *args)
    reduces, mean = options.reduction != "none", options.reduction == "mean"
    losses = loss.new_empty(n_rows) if reduces else loss
    zs = (loss.new_empty(n_rows) if reduces else z) if save_z_loss else None
    launch(
        cross_entropy_fwd_kernel, plan,
        logits, target, weight, _sum_of(weight, options.label_smoothing, loss.dtype), losses,
        lse if save_lse else None, lse_low if save_stats else None, zs,
    )  # fmt: skip
    if reduces:
        launch(
            cross_entropy_reduce_kernel,
            _plan_reduce(n_rows, logits.shape[-1], logits.dtype, options.ignore_index, mean),
            losses, zs, target, weight, loss, z if save_z_loss else None, total if save_stats and mean else None,
        )  # fmt: skip
    return outputs


def _empty_bwd(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


@planned
def _plan_bwd(
    shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: torch.device, options: LossOptions
) -> Plan | None:
    layout = row_strides(shape, strides)
    if layout is None:
        return None
    n_rows, n_cols = math.prod(shape[:-1]), shape[-1]
    block = _choose("cross_entropy_bwd_kernel", n_cols, _BACKWARD, dtype, device)
    n_tiles = triton.cdiv(n_cols, block["BLOCK_COLS"])
    numbers, constants = _shared_arguments(layout, n_cols, dtype, options)
    constants |= {"DLOSS_A_ROW": options.reduction == "none"}
    grid = (triton.cdiv(n_rows, block["BLOCK_ROWS"]) * n_tiles,)
    return Plan(grid, (n_rows, n_cols, n_tiles, *numbers), constants | block)


def _bwd(
    dloss: Tensor, logits: Tensor, target: Tensor, weight: Tensor | None, lse: Tensor, lse_low: Tensor,
    total_weight: Tensor | None, *args: Any,
) -> Tensor:  # fmt: skip
    options = LossOptions(*args)
    dlogits = _empty_bwd(logits)
    if dlogits.numel() == 0:
        return dlogits
    target, weight = target.contiguous(), contiguous(weight)
    plan = _plan_bwd(logits.shape, logits.stride(), logits.dtype, logits.device, options)
    if plan is None:
        return _bwd(dloss, logits.contiguous(), target, weight, lse, lse_low, total_weight, *args)
    launch(
        cross_entropy_bwd_kernel, plan,
        dloss.contiguous(), logits, target, weight, _sum_of(weight, options.label_smoothing, lse.dtype),
        lse.contiguous(), lse_low.contiguous(), total_weight, dlogits,
    )  # fmt: skip
    return dlogits


def _fake_fwd(logits: Tensor, target: Tensor, weight: Tensor | None, *args: Any) -> tuple[Tensor, ...]:
    options, save = LossOptions.from_operator_args(args)
    return _empty_fwd(logits, target, options.reduction, *save)


_cross_entropy_fwd = define(
    f"triton_cross_entropy_fwd(Tensor logits, Tensor target, Tensor? weight, {LossOptions.SCHEMA}, bool save_lse, "
    "bool save_z_loss, bool save_stats) "
    "-> (Tensor loss, Tensor lse, Tensor lse_low, Tensor z_loss, Tensor total_weight)",
    _fwd,
    _fake_fwd,
)
_cross_entropy_bwd = define(
    "triton_cross_entropy_bwd(Tensor dloss, Tensor logits, Tensor target, Tensor? weight, Tensor lse, Tensor lse_low, "
    f"Tensor? total_weight, {LossOptions.SCHEMA}) -> Tensor dlogits",
    _bwd,
    lambda dloss, logits, *_: _empty_bwd(logits),
)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, weight: Tensor | None, options: LossOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.options = options.operator_args()
        save = (True, options.return_z_loss, True)
        loss, lse, lse_low, z, total = _cross_entropy_fwd(logits, target, weight, *ctx.options, *save)
        ctx.save_for_backward(logits, target, weight, lse, lse_low, total if options.reduction == "mean" else None)
        ctx.mark_non_differentiable(lse, z)
        return loss, lse, z

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, *_: Any) -> Any:
        refuse_second_derivative("cross_entropy")
        return _cross_entropy_bwd(dloss, *ctx.saved_tensors, *ctx.options), None, None, None


def cross_entropy(logits: Tensor, target: Tensor, weight: Tensor | None, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`args` are the `LossOptions`, one by one as the native operator takes them."""
    options = LossOptions(*args)
    if torch.is_grad_enabled() and logits.requires_grad:
        return apply(_CrossEntropy, logits, target, weight, options)
    save = (options.return_lse, options.return_z_loss, False)
    loss, lse, _, z, _ = _cross_entropy_fwd(logits, target, weight, *options.operator_args(), *save)
    return loss, lse, z
