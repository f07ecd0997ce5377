"""The tiled way, over the kernels beside: what the two operators do where `chunk_size` is 0.

Forward: a program walks with a tile of tokens over a split of the classes, and no logit leaves it; another kernel adds
the splits. Backward: for some classes at a time a kernel makes their logits anew and writes the gradient of these, and
PyTorch's products make that of hidden, summed over the classes in float32, and that of weight. Of the latter every row
is complete at once, being a sum over all tokens within one product, so that no float32 copy of it exists. Four products
in all, where chunks of a reduced loss take three.

No block of classes is skipped for having small gradients ("Cut your losses" does): a row of the weight whose class is
no target of this step gets nothing but such gradients, and without them its own would be 0, wrong in every digit. Tiles
of tokens that count nothing are skipped, and read nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.devices import capability, device_of
from foundry_kernels._triton.launch import Plan, launch, planned
from foundry_kernels._triton.rows import compute_dtype, contiguous
from foundry_kernels.ops.linear_cross_entropy.chunks import empty_fwd, mean_of, total_weight
from foundry_kernels.ops.linear_cross_entropy.triton.kernels import (
    linear_cross_entropy_combine_kernel,
    linear_cross_entropy_dlogits_kernel,
    linear_cross_entropy_fwd_kernel,
    linear_cross_entropy_target_kernel,
)

#: Programs that the forward pass is split for, and into how many parts at most: by the shape alone, whatever the GPU,
#: so that bits do not depend on it.
_PROGRAMS, _MAX_SPLITS = 512, 64
#: Tokens whose product with float32 sums, in the gradient of 16-bit hidden, exists at a time.
_ROWS = 2048


class Loss(NamedTuple):
    """What the loss is, but for tensors and its reduction."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    logit_scale: float


def _tile(dtype: torch.dtype, arch: int, loss: Loss) -> dict[str, int]:
    """Tile of the kernels with products, arch 0 being the interpreter. 16 bits: that of a plain product, where it is
    asynchronous, with half the classes where it would spill. float32 is multiplied exactly, by fused multiply-adds,
    with its operands in registers."""
    roomy = device_of(arch).name in ("hopper", "blackwell") and loss.softcap is None and loss.label_smoothing == 0.0
    if arch == 0:
        rows, cols, width, warps, stages = 32, 32, 32, 4, 1
    elif dtype.itemsize == 2:
        rows, cols, width, warps, stages = 128, 128 if roomy else 64, 64, 8, 3
    else:
        rows, cols, width, warps, stages = 64, 64, 16, 8, 1
    return {"BLOCK_ROWS": rows, "BLOCK_COLS": cols, "BLOCK_WIDTH": width, "num_warps": warps, "num_stages": stages}


def _flags(loss: Loss, dtype: torch.dtype) -> dict[str, Any]:
    return {"CAP": loss.softcap is not None, "SMOOTH": loss.label_smoothing > 0.0, "COMPUTE": compute_dtype(dtype)}


@planned
def _plan_target(n_rows: int, n_cols: int, width: int, dtype: torch.dtype, loss: Loss) -> Plan:
    block = {"BLOCK_ROWS": 4, "BLOCK_WIDTH": min(512, triton.next_power_of_2(width)), "num_warps": 4}
    numbers = (n_rows, n_cols, width, loss.ignore_index, loss.logit_scale, loss.softcap or 0.0)
    flags = _flags(loss, dtype)
    del flags["SMOOTH"]
    return Plan((triton.cdiv(n_rows, block["BLOCK_ROWS"]),), numbers, flags | block)


@planned
def _plan_fwd(n_rows: int, n_cols: int, width: int, dtype: torch.dtype, arch: int, loss: Loss) -> tuple[int, Plan]:
    """The number of splits, and the launch. A split is of two tiles at least, and whole ones."""
    tile = _tile(dtype, arch, loss)
    n_row_tiles, n_tiles = triton.cdiv(n_rows, tile["BLOCK_ROWS"]), triton.cdiv(n_cols, tile["BLOCK_COLS"])
    n_splits = min(_MAX_SPLITS, triton.cdiv(_PROGRAMS, n_row_tiles), triton.cdiv(n_tiles, 2))
    cols_a_split = triton.cdiv(n_tiles, n_splits) * tile["BLOCK_COLS"]
    n_splits = triton.cdiv(n_cols, cols_a_split)
    numbers = (n_rows, n_cols, width, n_row_tiles, loss.ignore_index, loss.logit_scale, loss.softcap or 0.0)
    return n_splits, Plan((n_row_tiles * n_splits,), (*numbers, cols_a_split), _flags(loss, dtype) | tile)


@planned
def _plan_combine(n_rows: int, n_cols: int, n_splits: int, dtype: torch.dtype, loss: Loss) -> Plan:
    rows = min(128, triton.next_power_of_2(n_rows))
    share = loss.label_smoothing / n_cols
    numbers = (n_rows, n_cols, n_splits, loss.ignore_index, loss.label_smoothing, share, loss.z_loss)
    flags = _flags(loss, dtype) | {"BLOCK_ROWS": rows, "num_warps": 4}
    del flags["CAP"]
    return Plan((triton.cdiv(n_rows, rows),), numbers, flags)


@planned
def _plan_dlogits(
    n_rows: int, n_cols: int, width: int, first: int, n_out: int, dtype: torch.dtype, arch: int, loss: Loss
) -> Plan:
    tile = _tile(dtype, arch, loss)
    n_row_tiles = triton.cdiv(n_rows, tile["BLOCK_ROWS"])
    numbers = (n_rows, n_cols, width, n_row_tiles, loss.ignore_index, loss.logit_scale, loss.softcap or 0.0)
    rest = (first, n_out, loss.label_smoothing, loss.label_smoothing / n_cols, loss.z_loss)
    grid = (n_row_tiles * triton.cdiv(n_out, tile["BLOCK_COLS"]),)
    return Plan(grid, (*numbers, *rest), _flags(loss, dtype) | tile)


def classes_at_a_time(width: int, n_classes: int, itemsize: int, interpreted: bool) -> int:
    """Whose gradients of logits exist at a time in the backward pass: half the memory that hidden takes in 16 bits, and
    enough for a product. Each time hidden's float32 gradient is read and written."""
    least = 32 if interpreted else 1024
    return min(n_classes, max(least, width // itemsize // 128 * 128))


def _sum_of(class_weight: Tensor | None, loss: Loss, dtype: torch.dtype) -> Tensor | None:
    return None if class_weight is None or loss.label_smoothing == 0.0 else class_weight.to(dtype).sum()


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).contiguous()


def _target_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, dtype: torch.dtype, loss: Loss
) -> Tensor:
    picked = x.new_empty(x.shape[0], dtype=dtype)
    plan = _plan_target(x.shape[0], *weight.shape, x.dtype, loss)
    launch(linear_cross_entropy_target_kernel, plan, x, weight, bias, target, picked)
    return picked


def forward(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    ignore_index: int, reduction: str, label_smoothing: float, z_loss: float, softcap: float | None,
    logit_scale: float, save_lse: bool, save_z_loss: bool, save_stats: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    outputs = list(empty_fwd(hidden, weight, reduction, save_lse, save_z_loss, save_stats, (False,) * 3))
    loss = Loss(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    dtype, arch, n_rows = outputs[0].dtype, capability(hidden.device), target.numel()
    size = (n_rows, weight.shape[0], weight.shape[1], hidden.dtype)
    x, weight, target = _rows(hidden), weight.contiguous(), target.reshape(-1).contiguous()
    bias, class_weight = contiguous(bias), contiguous(class_weight)
    reduces = reduction != "none"
    losses = outputs[0].new_empty(n_rows) if reduces else outputs[0]
    zs = None if not save_z_loss else losses.new_empty(n_rows) if reduces else outputs[3]
    if n_rows:
        picked = _target_logits(x, weight, bias, target, dtype, loss)
        n_splits, plan = _plan_fwd(*size, arch, loss)
        smooth = label_smoothing > 0.0
        parts = losses.new_empty((3 if smooth else 2, n_splits, n_rows))
        partial = (parts[0], parts[1], parts[2] if smooth else None)
        launch(linear_cross_entropy_fwd_kernel, plan, x, weight, bias, target, class_weight, picked, *partial)
        launch(
            linear_cross_entropy_combine_kernel, _plan_combine(n_rows, weight.shape[0], n_splits, hidden.dtype, loss),
            *partial, picked, target, class_weight, _sum_of(class_weight, loss, dtype),
            losses, outputs[1] if save_lse else None, outputs[2] if save_stats else None, zs,
        )  # fmt: skip
    if reduces:
        mean = reduction == "mean"
        total = total_weight(target, class_weight, ignore_index, dtype) if mean else None
        for place, rows in ((0, losses), (3, zs)):
            if rows is not None:
                outputs[place] = rows.sum() if total is None else mean_of(rows, total)
    return tuple(outputs)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in the dtype of the arithmetic: PyTorch's."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def backward(
    dloss: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    lse: Tensor, lse_low: Tensor, ignore_index: int, reduction: str, label_smoothing: float, z_loss: float,
    softcap: float | None, logit_scale: float,
    need_dhidden: bool, need_dweight: bool, need_dbias: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    shapes = ((hidden.shape, need_dhidden), (weight.shape, need_dweight), (weight.shape[:1], need_dbias))
    dhidden, dweight, dbias = (hidden.new_empty(shape if needed else (0,)) for shape, needed in shapes)
    loss = Loss(ignore_index, label_smoothing, z_loss, softcap, logit_scale)
    dtype, arch, (n_classes, width) = lse.dtype, capability(hidden.device), weight.shape
    x, weight, target = _rows(hidden), weight.contiguous(), target.reshape(-1).contiguous()
    bias, class_weight = contiguous(bias), contiguous(class_weight)
    n_rows = target.numel()
    if need_dweight:  # 0 * NaN of a token that counts nothing would reach it
        clean = dhidden.view(x.shape) if need_dhidden else torch.empty_like(x)  # memory that has no other use yet
        x = clean.copy_(x).masked_fill_((target == ignore_index).unsqueeze(1), 0.0)
    # The gradient of a reduced loss is one number, which the sums are multiplied by: before them it could take float16
    # below its range.
    factor = None if reduction == "none" else dloss
    if reduction == "mean":
        total = total_weight(target, class_weight, ignore_index, dtype)
        factor = (dloss / total).masked_fill(total == 0, 0.0)
    of_rows = None if factor is not None else dloss.contiguous()
    lse, lse_low = lse.contiguous(), lse_low.contiguous()
    weight_sum = _sum_of(class_weight, loss, dtype)
    dx = x.new_zeros(x.shape if need_dhidden else (0, 0), dtype=dtype)
    db = x.new_zeros(n_classes if need_dbias else 0, dtype=dtype)
    step = classes_at_a_time(width, n_classes, weight.element_size(), arch == 0)
    memory = x.new_empty(n_rows * step)
    picked = _target_logits(x, weight, bias, target, dtype, loss) if n_rows else lse
    for first in range(0, n_classes if n_rows else 0, step):
        last = min(first + step, n_classes)
        dlogits = memory.narrow(0, 0, n_rows * (last - first)).view(n_rows, last - first)
        plan = _plan_dlogits(n_rows, n_classes, width, first, last - first, hidden.dtype, arch, loss)
        launch(
            linear_cross_entropy_dlogits_kernel, plan, of_rows, x, weight, bias, target, class_weight, weight_sum,
            lse, lse_low, picked, dlogits,
        )  # fmt: skip
        if need_dhidden and dlogits.dtype == dtype:
            dx.addmm_(dlogits, weight[first:last])
        elif need_dhidden:
            for sums, d in zip(dx.split(_ROWS), dlogits.split(_ROWS), strict=True):
                sums += _product(d, weight[first:last], dtype)
        if need_dweight:
            dweight[first:last] = _times(_product(dlogits.t(), x, dtype), factor)
        if need_dbias:
            db[first:last] = dlogits.sum(0, dtype=dtype)
    if need_dhidden:
        dhidden.view(x.shape).copy_(_times(dx, factor))
    if need_dweight and not n_rows:
        dweight.zero_()
    if need_dbias:
        dbias.copy_(_times(db, factor))
    return dhidden, dweight, dbias


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    """In place."""
    return x if factor is None else x.mul_(factor)
