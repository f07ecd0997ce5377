"""The tiled kernels; see the launchers beside, and the mathematics in `cross_entropy/__init__`.

Names: b_ is a block of values; rows are tokens and cols classes. hidden and weight are contiguous, `width` numbers a
row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import dot, round_to
from foundry_kernels.ops.cross_entropy.triton.kernels import cap_slope, capped, row_gradients, store_rows

#: Numbers of no use to the compiler: it would make a kernel for each kind of them.
_PLAIN = ("n_rows", "n_row_tiles", "ignore_index")


@triton.jit
def _targets(target_ptr, rows, n_rows, n_cols, ignore_index):
    """Targets of rows, whether they are rows at all, count, and are a class."""
    live = rows < n_rows
    b_target = tl.load(target_ptr + rows, mask=live, other=0).to(tl.int64)
    counts = live & (b_target != ignore_index)
    return b_target, live, counts, counts & (b_target >= 0) & (b_target < n_cols)


@triton.jit
def _logits(
    hidden_ptr, weight_ptr, bias_ptr, rows, read, cols, n_cols, width, needed, logit_scale, softcap,
    CAP: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile of the logits [BLOCK_ROWS, BLOCK_COLS] that is never rounded; of rows that are not `read` it is of no
    use. `needed` is `width`, or 0 where no row is read."""
    b_y = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
    o_hidden = rows[:, None] * width
    o_weight = cols.to(tl.int64)[None, :] * width
    m_cols = (cols < n_cols)[None, :]
    for start in range(0, needed, BLOCK_WIDTH):
        dims = start + tl.arange(0, BLOCK_WIDTH)
        m_rows = read[:, None] & (dims < width)[None, :]
        b_x = tl.load(hidden_ptr + o_hidden + dims[None, :], mask=m_rows, other=0.0)  # [rows, width]
        b_w = tl.load(weight_ptr + o_weight + dims[:, None], mask=m_cols & (dims < width)[:, None], other=0.0)
        b_y = dot(b_x, b_w, b_y)
    if bias_ptr is not None:
        b_y += tl.load(bias_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)[None, :]
    return capped(b_y * logit_scale, softcap, CAP)


@triton.jit(do_not_specialize=_PLAIN)
def linear_cross_entropy_target_kernel(
    hidden_ptr, weight_ptr, bias_ptr, target_ptr, picked_ptr,
    n_rows, n_cols, width, ignore_index, logit_scale, softcap,
    CAP: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """The logit of each row's target; 0 where that is no class."""
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter truncates a bare float to float32 where a function takes it
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_target, live, _counts, known = _targets(target_ptr, rows, n_rows, n_cols, ignore_index)
    b_sum = tl.zeros([BLOCK_ROWS, BLOCK_WIDTH], COMPUTE)
    for start in range(0, width, BLOCK_WIDTH):
        dims = (start + tl.arange(0, BLOCK_WIDTH))[None, :]
        mask = known[:, None] & (dims < width)
        b_x = tl.load(hidden_ptr + rows[:, None] * width + dims, mask=mask, other=0.0).to(COMPUTE)
        b_sum += b_x * tl.load(weight_ptr + b_target[:, None] * width + dims, mask=mask, other=0.0).to(COMPUTE)
    b_y = tl.sum(b_sum, 1)
    if bias_ptr is not None:
        b_y += tl.load(bias_ptr + b_target, mask=known, other=0.0).to(COMPUTE)
    b_y = capped(b_y * logit_scale, b_zero + softcap, CAP)
    tl.store(picked_ptr + rows, tl.where(known, b_y, 0.0), mask=live)


@triton.jit
def _center(b_picked):
    """Returns the value that logits are counted from in the sum of label smoothing."""
    return tl.where((b_picked == b_picked) & (tl.abs(b_picked) != float("inf")), b_picked, 0.0)


@triton.jit(do_not_specialize=_PLAIN)
def linear_cross_entropy_fwd_kernel(
    hidden_ptr, weight_ptr, bias_ptr, target_ptr, class_weight_ptr, picked_ptr, max_ptr, sum_ptr, offset_ptr, best_ptr,
    n_rows, n_cols, width, n_row_tiles, ignore_index, logit_scale, softcap, cols_a_split,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """Writes for each row and a split of the classes, all but the target, the largest logit, the sum of the
    exponentials below it, for label smoothing the weighted sum of the logits' distances to the target's, and for
    predictions the class of the largest.

    A program takes a tile of rows and walks over the split. Those of one split run next to each other: they read the
    same classes. A tile of which no row counts reads nothing.
    """
    b_zero = tl.full([], 0.0, COMPUTE)
    tile, split = tl.program_id(0) % n_row_tiles, tl.program_id(0) // n_row_tiles
    rows = tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_target, live, _counts, known = _targets(target_ptr, rows, n_rows, n_cols, ignore_index)
    b_center = _center(tl.load(picked_ptr + rows, mask=live, other=0.0))

    b_max = tl.full([BLOCK_ROWS], -float("inf"), COMPUTE)
    b_sum = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_offset = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_best = tl.zeros([BLOCK_ROWS], tl.int32)
    first = split * cols_a_split
    last = tl.where(tl.max(known.to(tl.int32), 0) == 1, tl.minimum(first + cols_a_split, n_cols), first)
    for start in range(first, last, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        b_y = _logits(
            hidden_ptr, weight_ptr, bias_ptr, rows, known, cols, n_cols, width, width,
            b_zero + logit_scale, b_zero + softcap, CAP, COMPUTE, BLOCK_ROWS, BLOCK_COLS, BLOCK_WIDTH,
        )  # fmt: skip
        others = (cols < n_cols)[None, :] & (cols[None, :] != b_target[:, None])
        if SMOOTH:
            b_off = tl.where(others, b_y - b_center[:, None], 0.0)
            if class_weight_ptr is not None:
                b_off *= tl.load(class_weight_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)[None, :]
            b_offset += tl.sum(b_off, 1)
        b_y = tl.where(others, b_y, -float("inf"))
        if best_ptr is None:
            b_new = tl.maximum(b_max, tl.max(b_y, 1))
        else:
            b_here, b_col = tl.max(b_y, 1, return_indices=True)
            b_best = tl.where(b_here > b_max, start + b_col, b_best)  # of equal ones the first
            b_new = tl.maximum(b_max, b_here)
        b_shift = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_sum = b_sum * tl.exp(b_max - b_shift) + tl.sum(tl.exp(b_y - b_shift[:, None]), 1)
        b_max = b_new

    at = split.to(tl.int64) * n_rows + rows
    tl.store(max_ptr + at, b_max, mask=live)
    tl.store(sum_ptr + at, b_sum, mask=live)
    if SMOOTH:
        tl.store(offset_ptr + at, b_offset, mask=live)
    if best_ptr is not None:
        tl.store(best_ptr + at, b_best, mask=live)


@triton.jit(do_not_specialize=[*_PLAIN, "n_cols", "n_splits"])
def linear_cross_entropy_combine_kernel(
    max_ptr, sum_ptr, offset_ptr, picked_ptr, target_ptr, class_weight_ptr, weight_sum_ptr,
    loss_ptr, lse_ptr, lse_low_ptr, z_ptr,
    n_rows, n_cols, n_splits, ignore_index, label_smoothing, share, z_loss,
    SMOOTH: tl.constexpr, COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """The splits' sums added in their order; the rest is as in `cross_entropy_fwd_kernel`."""
    b_zero = tl.full([], 0.0, COMPUTE)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_target, live, counts, known = _targets(target_ptr, rows, n_rows, n_cols, ignore_index)
    b_picked = tl.load(picked_ptr + rows, mask=live, other=0.0)
    b_max = b_picked
    for split in range(n_splits):
        at = tl.cast(split, tl.int64) * n_rows + rows
        b_max = tl.maximum(b_max, tl.load(max_ptr + at, mask=live, other=0.0))
    b_shift = tl.where(b_max == -float("inf"), 0.0, b_max)
    b_sum = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_offset = tl.zeros([BLOCK_ROWS], COMPUTE)
    for split in range(n_splits):
        at = tl.cast(split, tl.int64) * n_rows + rows
        b_below = tl.exp(tl.load(max_ptr + at, mask=live, other=0.0) - b_shift)
        b_sum += tl.load(sum_ptr + at, mask=live, other=0.0) * b_below
        if SMOOTH:
            b_offset += tl.load(offset_ptr + at, mask=live, other=0.0)
    store_rows(
        b_max, b_sum, b_offset, b_picked, _center(b_picked), rows, live, counts, known, b_target,
        class_weight_ptr, weight_sum_ptr, loss_ptr, lse_ptr, lse_low_ptr, z_ptr,
        n_cols, b_zero + label_smoothing, b_zero + share, b_zero + z_loss, SMOOTH, COMPUTE,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*_PLAIN, "first"])
def linear_cross_entropy_dlogits_kernel(
    dloss_ptr, hidden_ptr, weight_ptr, bias_ptr, target_ptr, class_weight_ptr, weight_sum_ptr,
    lse_ptr, lse_low_ptr, picked_ptr, dlogits_ptr,
    n_rows, n_cols, width, n_row_tiles, ignore_index, logit_scale, softcap, first, n_out,
    label_smoothing, share, z_loss,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
):  # fmt: skip
    """dlogits [n_rows, n_out], of the products of hidden with classes first, first + 1, ...: the logits made anew, as
    in the forward pass, and rounded only now. Without `dloss_ptr` that of each row is 1."""
    b_zero = tl.full([], 0.0, COMPUTE)
    tile, block = tl.program_id(0) % n_row_tiles, tl.program_id(0) // n_row_tiles
    rows = tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_target, live, counts, known = _targets(target_ptr, rows, n_rows, n_cols, ignore_index)
    b_dloss = tl.full([BLOCK_ROWS], 1.0, COMPUTE)
    if dloss_ptr is not None:
        b_dloss = tl.load(dloss_ptr + rows, mask=live, other=0.0).to(COMPUTE)
    b_dloss = tl.where(known, b_dloss, tl.where(counts, float("nan"), 0.0))
    read = known & (b_dloss != 0.0)

    out = block * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    cols = first + out
    needed = tl.where(tl.max(read.to(tl.int32), 0) == 1, width, 0)
    b_y = _logits(
        hidden_ptr, weight_ptr, bias_ptr, rows, read, cols, n_cols, width, needed, b_zero + logit_scale,
        b_zero + softcap, CAP, COMPUTE, BLOCK_ROWS, BLOCK_COLS, BLOCK_WIDTH,
    )  # fmt: skip
    b_lse = tl.load(lse_ptr + rows, mask=read, other=0.0)
    b_low = tl.load(lse_low_ptr + rows, mask=read, other=0.0)
    b_picked = tl.load(picked_ptr + rows, mask=read, other=0.0)
    b_factor, b_at = row_gradients(
        b_lse, b_low, b_picked, known, b_target, class_weight_ptr, weight_sum_ptr, n_cols,
        b_zero + label_smoothing, b_zero + share, b_zero + z_loss, SMOOTH, COMPUTE,
    )  # fmt: skip
    b_v = b_factor[:, None] * tl.exp((b_y - b_lse[:, None]) - b_low[:, None])
    if SMOOTH:
        if class_weight_ptr is None:
            b_v -= share
        else:
            b_class = tl.load(class_weight_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)
            b_v -= share * b_class[None, :]
    b_v = tl.where(cols[None, :] == b_target[:, None], b_at[:, None], b_v) * (b_dloss * logit_scale)[:, None]
    if CAP:
        b_v *= cap_slope(b_y, b_zero + softcap)
    b_v = tl.where(read[:, None] | (counts & ~known)[:, None], b_v, 0.0)
    mask = live[:, None] & (out < n_out)[None, :]
    tl.store(dlogits_ptr + rows[:, None] * n_out + out[None, :], round_to(b_v, dlogits_ptr.dtype.element_ty), mask=mask)
