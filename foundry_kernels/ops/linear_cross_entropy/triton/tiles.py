"""The tiled strategy, over the kernels beside: what the two operators do for "tiles".

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

from typing import Any

import torch
import triton
from torch import Tensor

from foundry_kernels._triton.devices import capability, device_of
from foundry_kernels._triton.launch import Plan, launch, planned
from foundry_kernels._triton.rows import compute_dtype, contiguous
from foundry_kernels.ops.cross_entropy.tokens import NO_CLASS, known_targets
from foundry_kernels.ops.linear_cross_entropy.calls import (
    Inputs,
    Needs,
    Outputs,
    Saves,
    empty_outputs,
    mean_of,
    total_weight,
)
from foundry_kernels.ops.linear_cross_entropy.options import LinearLossOptions
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


def _tile(dtype: torch.dtype, arch: int, options: LinearLossOptions) -> dict[str, int]:
    """Tile of the kernels with products, arch 0 being the interpreter. 16 bits: that of a plain product, where it is
    asynchronous, with half the classes where it would spill. float32 is multiplied exactly, by fused multiply-adds,
    with its operands in registers."""
    roomy = (
        device_of(arch).name in ("hopper", "blackwell") and options.softcap is None and options.label_smoothing == 0.0
    )
    if arch == 0:
        rows, cols, width, warps, stages = 32, 32, 32, 4, 1
    elif dtype.itemsize == 2:
        rows, cols, width, warps, stages = 128, 128 if roomy else 64, 64, 8, 3
    else:
        rows, cols, width, warps, stages = 64, 64, 16, 8, 1
    return {"BLOCK_ROWS": rows, "BLOCK_COLS": cols, "BLOCK_WIDTH": width, "num_warps": warps, "num_stages": stages}


def _flags(options: LinearLossOptions, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "CAP": options.softcap is not None,
        "SMOOTH": options.label_smoothing > 0.0,
        "COMPUTE": compute_dtype(dtype),
    }


@planned
def _plan_target(n_rows: int, n_cols: int, width: int, dtype: torch.dtype, options: LinearLossOptions) -> Plan:
    block = {"BLOCK_ROWS": 4, "BLOCK_WIDTH": min(512, triton.next_power_of_2(width)), "num_warps": 4}
    numbers = (n_rows, n_cols, width, options.ignore_index, options.logit_scale, options.softcap or 0.0)
    flags = _flags(options, dtype)
    del flags["SMOOTH"]
    return Plan((triton.cdiv(n_rows, block["BLOCK_ROWS"]),), numbers, flags | block)


@planned
def _plan_fwd(
    n_rows: int, n_cols: int, width: int, dtype: torch.dtype, arch: int, options: LinearLossOptions
) -> tuple[int, Plan]:
    """The number of splits, and the launch. A split is of two tiles at least, and whole ones."""
    tile = _tile(dtype, arch, options)
    n_row_tiles, n_tiles = triton.cdiv(n_rows, tile["BLOCK_ROWS"]), triton.cdiv(n_cols, tile["BLOCK_COLS"])
    n_splits = min(_MAX_SPLITS, triton.cdiv(_PROGRAMS, n_row_tiles), triton.cdiv(n_tiles, 2))
    if dtype.itemsize == 4 and device_of(arch).name == "blackwell":
        tile["maxnreg"] = 255  # or 8 bytes are spilled for an occupancy that ptxas guesses, where classes are predicted
    cols_a_split = triton.cdiv(n_tiles, n_splits) * tile["BLOCK_COLS"]
    n_splits = triton.cdiv(n_cols, cols_a_split)
    numbers = (n_rows, n_cols, width, n_row_tiles, options.ignore_index, options.logit_scale, options.softcap or 0.0)
    return n_splits, Plan((n_row_tiles * n_splits,), (*numbers, cols_a_split), _flags(options, dtype) | tile)


@planned
def _plan_combine(n_rows: int, n_cols: int, n_splits: int, dtype: torch.dtype, options: LinearLossOptions) -> Plan:
    rows = min(128, triton.next_power_of_2(n_rows))
    share = options.label_smoothing / n_cols
    numbers = (n_rows, n_cols, n_splits, options.ignore_index, options.label_smoothing, share, options.z_loss)
    flags = _flags(options, dtype) | {"BLOCK_ROWS": rows, "num_warps": 4}
    del flags["CAP"]
    return Plan((triton.cdiv(n_rows, rows),), numbers, flags)


@planned
def _plan_dlogits(
    n_rows: int,
    n_cols: int,
    width: int,
    first: int,
    n_out: int,
    dtype: torch.dtype,
    arch: int,
    options: LinearLossOptions,
) -> Plan:
    tile = _tile(dtype, arch, options)
    n_row_tiles = triton.cdiv(n_rows, tile["BLOCK_ROWS"])
    numbers = (n_rows, n_cols, width, n_row_tiles, options.ignore_index, options.logit_scale, options.softcap or 0.0)
    rest = (first, n_out, options.label_smoothing, options.label_smoothing / n_cols, options.z_loss)
    grid = (n_row_tiles * triton.cdiv(n_out, tile["BLOCK_COLS"]),)
    return Plan(grid, (*numbers, *rest), _flags(options, dtype) | tile)


def classes_at_a_time(width: int, n_classes: int, itemsize: int, interpreted: bool) -> int:
    """Whose gradients of logits exist at a time in the backward pass: half the memory that hidden takes in 16 bits, and
    enough for a product. Each time hidden's float32 gradient is read and written."""
    least = 32 if interpreted else 1024
    return min(n_classes, max(least, width // itemsize // 128 * 128))


def _sum_of(class_weight: Tensor | None, options: LinearLossOptions, dtype: torch.dtype) -> Tensor | None:
    return None if class_weight is None or options.label_smoothing == 0.0 else class_weight.to(dtype).sum()


def _rows(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1]).contiguous()


def _target_logits(
    x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, dtype: torch.dtype, options: LinearLossOptions
) -> Tensor:
    picked = x.new_empty(x.shape[0], dtype=dtype)
    plan = _plan_target(x.shape[0], *weight.shape, x.dtype, options)
    launch(linear_cross_entropy_target_kernel, plan, x, weight, bias, target, picked)
    return picked


def forward(inputs: Inputs, options: LinearLossOptions, saves: Saves) -> Outputs:
    hidden, weight, target, bias, class_weight = inputs
    outputs = empty_outputs(inputs, options, saves)
    dtype, arch, n_rows = outputs.loss.dtype, capability(hidden.device), target.numel()
    size = (n_rows, weight.shape[0], weight.shape[1], hidden.dtype)
    x, weight, target = _rows(hidden), weight.contiguous(), target.reshape(-1).contiguous()
    bias, class_weight = contiguous(bias), contiguous(class_weight)
    reduces = options.reduction != "none"
    losses = outputs.loss.new_empty(n_rows) if reduces else outputs.loss
    zs = None if not saves.z_loss else losses.new_empty(n_rows) if reduces else outputs.z_loss
    if n_rows:
        picked = _target_logits(x, weight, bias, target, dtype, options)
        n_splits, plan = _plan_fwd(*size, arch, options)
        smooth = options.label_smoothing > 0.0
        parts = losses.new_empty((3 if smooth else 2, n_splits, n_rows))
        partial = (parts[0], parts[1], parts[2] if smooth else None)
        best = losses.new_empty((n_splits, n_rows), dtype=torch.int32) if saves.predicted else None
        launch(linear_cross_entropy_fwd_kernel, plan, x, weight, bias, target, class_weight, picked, *partial, best)
        if best is not None:
            found = _predictions(parts[0], best, picked, target)
            known = known_targets(target, weight.shape[0], options.ignore_index)
            outputs.predicted.view(-1).copy_(found.masked_fill_(~known, NO_CLASS))
        launch(
            linear_cross_entropy_combine_kernel,
            _plan_combine(n_rows, weight.shape[0], n_splits, hidden.dtype, options),
            *partial, picked, target, class_weight, _sum_of(class_weight, options, dtype),
            losses, outputs.lse if saves.lse else None, outputs.lse_low if saves.stats else None, zs,
        )  # fmt: skip
    if not reduces:
        return outputs
    total = None
    if options.reduction == "mean":
        total = total_weight(target, class_weight, options.ignore_index, dtype)

    def reduced(rows: Tensor) -> Tensor:
        return rows.sum() if total is None else mean_of(rows, total)

    outputs = outputs._replace(loss=reduced(losses))
    return outputs if zs is None else outputs._replace(z_loss=reduced(zs))


def _predictions(largest: Tensor, best: Tensor, picked: Tensor, target: Tensor) -> Tensor:
    """The class of each row's largest logit: of the splits' largest without the target's, and of that. Of equal ones
    the first, as in `torch.argmax`."""
    of_others, split = largest.max(0)
    other = best.gather(0, split.unsqueeze(0)).squeeze(0).to(torch.int64)
    is_target = (picked > of_others) | ((picked == of_others) & (target < other))
    return torch.where(is_target, target.to(torch.int64), other)


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a @ b in the dtype of the arithmetic: PyTorch's."""
    if a.dtype == dtype:
        return torch.mm(a, b)
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=dtype)
    return torch.mm(a.to(dtype), b.to(dtype))


def backward(
    dloss: Tensor, inputs: Inputs, lse: Tensor, lse_low: Tensor, options: LinearLossOptions, needs: Needs
) -> tuple[Tensor, ...]:
    hidden, weight, target, bias, class_weight = inputs
    shapes = ((hidden.shape, needs.hidden), (weight.shape, needs.weight), (weight.shape[:1], needs.bias))
    dhidden, dweight, dbias = (hidden.new_empty(shape if needed else (0,)) for shape, needed in shapes)
    dtype, arch, (n_classes, width) = lse.dtype, capability(hidden.device), weight.shape
    x, weight, target = _rows(hidden), weight.contiguous(), target.reshape(-1).contiguous()
    bias, class_weight = contiguous(bias), contiguous(class_weight)
    n_rows = target.numel()
    if needs.weight:  # 0 * NaN of a token that counts nothing would reach it
        clean = dhidden.view(x.shape) if needs.hidden else torch.empty_like(x)  # memory that has no other use yet
        x = clean.copy_(x).masked_fill_((target == options.ignore_index).unsqueeze(1), 0.0)
    # The gradient of a reduced loss is one number, which the sums are multiplied by: before them it could take float16
    # below its range.
    factor = None if options.reduction == "none" else dloss
    if options.reduction == "mean":
        total = total_weight(target, class_weight, options.ignore_index, dtype)
        factor = (dloss / total).masked_fill(total == 0, 0.0)
    of_rows = None if factor is not None else dloss.contiguous()
    lse, lse_low = lse.contiguous(), lse_low.contiguous()
    weight_sum = _sum_of(class_weight, options, dtype)
    dx = x.new_zeros(x.shape if needs.hidden else (0, 0), dtype=dtype)
    db = x.new_zeros(n_classes if needs.bias else 0, dtype=dtype)
    step = classes_at_a_time(width, n_classes, weight.element_size(), arch == 0)
    memory = x.new_empty(n_rows * step)
    picked = _target_logits(x, weight, bias, target, dtype, options) if n_rows else lse
    for first in range(0, n_classes if n_rows else 0, step):
        last = min(first + step, n_classes)
        dlogits = memory.narrow(0, 0, n_rows * (last - first)).view(n_rows, last - first)
        plan = _plan_dlogits(n_rows, n_classes, width, first, last - first, hidden.dtype, arch, options)
        launch(
            linear_cross_entropy_dlogits_kernel, plan, of_rows, x, weight, bias, target, class_weight, weight_sum,
            lse, lse_low, picked, dlogits,
        )  # fmt: skip
        if needs.hidden and dlogits.dtype == dtype:
            dx.addmm_(dlogits, weight[first:last])
        elif needs.hidden:
            for sums, d in zip(dx.split(_ROWS), dlogits.split(_ROWS), strict=True):
                sums += _product(d, weight[first:last], dtype)
        if needs.weight:
            dweight[first:last] = _times(_product(dlogits.t(), x, dtype), factor)
        if needs.bias:
            db[first:last] = dlogits.sum(0, dtype=dtype)
    if needs.hidden:
        dhidden.view(x.shape).copy_(_times(dx, factor))
    if needs.weight and not n_rows:
        dweight.zero_()
    if needs.bias:
        dbias.copy_(_times(db, factor))
    return dhidden, dweight, dbias


def _times(x: Tensor, factor: Tensor | None) -> Tensor:
    """Multiplies x in place."""
    return x if factor is None else x.mul_(factor)
