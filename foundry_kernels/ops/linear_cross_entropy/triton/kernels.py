"""The kernels between the matmuls. The mathematics is in `cross_entropy/__init__`.

Logits [n_rows, n_out] are contiguous and belong to the classes first, first + 1, ..., or to all. Names: b_ is a block
of values; rows are tokens and cols classes."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels.ops.cross_entropy.triton.kernels import (
    add_classes,
    capped,
    class_gradients,
    finite,
    row_gradients,
    row_targets,
    store_rows,
)

#: The compiler does not specialise on these: it would compile more kernels without making them faster.
_PLAIN = ("n_rows", "first", "ignore_index")


@triton.jit(do_not_specialize=_PLAIN)
def linear_cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, class_weight_ptr, weight_sum_ptr, state_ptr, dloss_ptr,
    loss_ptr, lse_ptr, lse_low_ptr, z_ptr,
    n_rows, n_cols, n_out, first, ignore_index, label_smoothing, share, z_loss, softcap,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Adds these classes to the running values of each row. With `loss_ptr`, writes the requested results: loss, lse,
    its rounding error and z-loss.

    Without `state_ptr`, the logits have all classes. `state_ptr` [3, n_rows], or [5, n_rows] with SMOOTH, passes the
    running values from one block of classes to the next: the largest logit, the sum relative to it and the target's
    logit. With `dloss_ptr`, the losses' gradient, the logits (of all classes) are overwritten with their gradient.
    """
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter truncates a bare float to float32 where a function takes it
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_target, live, counts, known = row_targets(target_ptr, rows, n_rows, n_cols, ignore_index)
    o_x = rows * n_out
    b_at = b_target - first
    here = known & (b_at >= 0) & (b_at < n_out)
    b_picked = capped(tl.load(logits_ptr + o_x + b_at, mask=here, other=0.0).to(COMPUTE), b_zero + softcap, CAP)

    b_max = tl.full([BLOCK_ROWS], -float("inf"), COMPUTE)
    b_sum = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_offset = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_center = b_offset
    if SMOOTH:  # distances may be relative to any logit: this is the first class's
        b_center = finite(capped(tl.load(logits_ptr + o_x, mask=known, other=0.0).to(COMPUTE), b_zero + softcap, CAP))
    if state_ptr is not None:
        state = state_ptr + rows
        old = known & (b_at < b_target)  # first > 0, as [rows]: Triton 3.9's interpreter has no scalar masks
        b_max = tl.load(state, mask=old, other=-float("inf"))
        b_sum = tl.load(state + n_rows, mask=old, other=0.0)
        b_picked = tl.where(here, b_picked, tl.load(state + 2 * n_rows, mask=old, other=0.0))
        if SMOOTH:
            b_offset = tl.load(state + 3 * n_rows, mask=old, other=0.0)
            b_center = tl.where(old, tl.load(state + 4 * n_rows, mask=old, other=0.0), b_center)

    for start in range(0, n_out, BLOCK_COLS):
        out = start + tl.arange(0, BLOCK_COLS)
        mask = known[:, None] & (out < n_out)[None, :]
        b_x = tl.load(logits_ptr + o_x[:, None] + out[None, :], mask=mask, other=0.0).to(COMPUTE)
        b_max, b_sum, b_offset = add_classes(
            b_max, b_sum, b_offset, capped(b_x, b_zero + softcap, CAP), b_center,
            mask, mask & (out[None, :] != b_at[:, None]), first + out, class_weight_ptr, n_cols, SMOOTH, COMPUTE,
        )  # fmt: skip

    if loss_ptr is None:
        state = state_ptr + rows
        tl.store(state, b_max, mask=known)
        tl.store(state + n_rows, b_sum, mask=known)
        tl.store(state + 2 * n_rows, b_picked, mask=known)
        if SMOOTH:
            tl.store(state + 3 * n_rows, b_offset, mask=known)
            tl.store(state + 4 * n_rows, b_center, mask=known)
    else:
        b_lse, b_low = store_rows(
            b_max, b_sum, b_offset, b_picked, b_center, rows, live, counts, known, b_target,
            class_weight_ptr, weight_sum_ptr, loss_ptr, lse_ptr, lse_low_ptr, z_ptr,
            n_cols, b_zero + label_smoothing, b_zero + share, b_zero + z_loss, SMOOTH, COMPUTE,
        )  # fmt: skip
        if dloss_ptr is not None:
            b_dloss = tl.load(dloss_ptr + rows, mask=live, other=0.0).to(COMPUTE)
            b_dloss = tl.where(known, b_dloss, tl.where(counts, float("nan"), 0.0))
            b_factor, b_own = row_gradients(
                b_lse, b_low, b_picked, known, b_target, class_weight_ptr, weight_sum_ptr, n_cols,
                b_zero + label_smoothing, b_zero + share, b_zero + z_loss, SMOOTH, COMPUTE,
            )  # fmt: skip
            for start in range(0, n_out, BLOCK_COLS):
                cols = start + tl.arange(0, BLOCK_COLS)
                mask = live[:, None] & (cols < n_out)[None, :]
                x_ptr = logits_ptr + o_x[:, None] + cols[None, :]
                b_x = tl.load(x_ptr, mask=mask & known[:, None], other=0.0).to(COMPUTE)
                b_v = class_gradients(
                    capped(b_x, b_zero + softcap, CAP), cols, b_target, b_lse, b_low, b_factor, b_own, b_dloss,
                    known & (b_dloss != 0.0), counts & ~known, class_weight_ptr, n_cols,
                    b_zero + share, b_zero + softcap, CAP, SMOOTH, COMPUTE,
                )  # fmt: skip
                tl.store(x_ptr, round_to(b_v, logits_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_PLAIN)
def linear_cross_entropy_bwd_kernel(
    dloss_ptr, logits_ptr, target_ptr, class_weight_ptr, weight_sum_ptr, lse_ptr, lse_low_ptr,
    n_rows, n_cols, n_out, n_tiles, first, ignore_index, label_smoothing, share, z_loss, softcap,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Overwrites the logits with their gradient; a program owns a tile. `dloss_ptr` has the gradient of each row's
    loss."""
    b_zero = tl.full([], 0.0, COMPUTE)
    rows = (tl.program_id(0) // n_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out = (tl.program_id(0) % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    b_target, live, counts, known = row_targets(target_ptr, rows, n_rows, n_cols, ignore_index)
    b_dloss = tl.load(dloss_ptr + rows, mask=live, other=0.0).to(COMPUTE)
    b_dloss = tl.where(known, b_dloss, tl.where(counts, float("nan"), 0.0))
    read = known & (b_dloss != 0.0)

    mask = live[:, None] & (out < n_out)[None, :]
    x_ptr = logits_ptr + (rows * n_out)[:, None] + out[None, :]
    b_x = tl.load(x_ptr, mask=mask & read[:, None], other=0.0).to(COMPUTE)
    b_y = capped(b_x, b_zero + softcap, CAP)
    # Only the target's own tile needs the target's logit. It is taken from the tile: another program may have
    # overwritten it in memory.
    is_target = (first + out)[None, :] == b_target[:, None]
    b_picked = tl.sum(tl.where(is_target, b_y, 0.0), 1)
    b_lse = tl.load(lse_ptr + rows, mask=read, other=0.0)
    b_low = tl.load(lse_low_ptr + rows, mask=read, other=0.0)
    b_factor, b_own = row_gradients(
        b_lse, b_low, b_picked, known, b_target, class_weight_ptr, weight_sum_ptr, n_cols,
        b_zero + label_smoothing, b_zero + share, b_zero + z_loss, SMOOTH, COMPUTE,
    )  # fmt: skip
    b_v = class_gradients(
        b_y, first + out, b_target, b_lse, b_low, b_factor, b_own, b_dloss, read, counts & ~known,
        class_weight_ptr, n_cols, b_zero + share, b_zero + softcap, CAP, SMOOTH, COMPUTE,
    )  # fmt: skip
    tl.store(x_ptr, round_to(b_v, logits_ptr.dtype.element_ty), mask=mask)
