"""The kernels of cross-entropy.

Names: `row_offset` finds a row by `n1, n2, *s`; b_ is a block of values, o_ offsets; `picked` is the target's logit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to, row_offset, tanh

#: The compiler does not specialise on these: it would compile more kernels without making them faster.
_PLAIN = ("n_rows", "n1", "n2", "ignore_index")


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, to a few units in the last place. For small x it is 2 artanh(x / (2 + x)), whose series
    needs 8 terms."""
    z = x / (2.0 + x)
    s = z * z
    series = 1.0 + s * (1.0 / 3 + s * (1.0 / 5 + s * (1.0 / 7 + s * (1.0 / 9 + s * (1.0 / 11 + s * (1.0 / 13))))))
    return tl.where(x < 0.125, 2.0 * z * series, tl.log(1.0 + x))


@triton.jit
def expm1(x):
    """e^x - 1 for x <= 0, by Taylor's series where the subtraction would lose digits."""
    small = tl.maximum(x, -0.5)
    p = 1.0 + small * (1.0 / 14)
    for i in tl.static_range(12):
        p = 1.0 + small * (1.0 / (13 - i)) * p
    return tl.where(x > -0.5, x * p, tl.exp(x) - 1.0)


@triton.jit
def capped(b_x, softcap, CAP: tl.constexpr):
    if CAP:
        return softcap * tanh(b_x / softcap)
    else:
        return b_x


@triton.jit
def cap_slope(b_y, softcap):
    """Derivative of the soft cap, from the capped value."""
    b_t = b_y / softcap
    return 1.0 - b_t * b_t


@triton.jit
def row_targets(target_ptr, rows, n_rows, n_cols, ignore_index):
    """Returns the targets of rows; whether the rows exist; whether they count; and whether their targets are
    classes."""
    live = rows < n_rows
    b_target = tl.load(target_ptr + rows, mask=live, other=0).to(tl.int64)
    counts = live & (b_target != ignore_index)
    return b_target, live, counts, counts & (b_target >= 0) & (b_target < n_cols)


@triton.jit
def row_weight(weight_ptr, b_target, known, COMPUTE: tl.constexpr):
    """The weights of the targets' classes; 0 for targets that are not a class."""
    if weight_ptr is None:
        return known.to(COMPUTE)
    else:
        return tl.load(weight_ptr + b_target, mask=known, other=0.0).to(COMPUTE)


@triton.jit
def load_weight_sum(weight_sum_ptr, n_cols, COMPUTE: tl.constexpr):
    if weight_sum_ptr is None:
        return tl.full((), n_cols, COMPUTE)
    else:
        return tl.load(weight_sum_ptr).to(COMPUTE)


@triton.jit
def store_rows(
    b_max, b_sum, b_offset, b_picked, b_center, rows, live, counts, known, b_target, weight_ptr, weight_sum_ptr,
    loss_ptr, lse_ptr, lse_low_ptr, z_ptr, n_cols, label_smoothing, share, z_loss,
    SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Stores the requested results of rows, and returns lse and its rounding error. Inputs are the largest logit; the
    sum of the exponentials relative to it, without the target's; and with label smoothing the weighted sum of the
    logits' distances to `b_center`."""
    b_top = b_max == b_picked
    b_log = tl.where(b_top, log1p(b_sum), tl.log(b_sum + tl.where(b_top, 1.0, tl.exp(b_picked - b_max))))
    b_whole = b_max + b_log
    b_part = b_whole - b_max
    b_low = (b_max - (b_whole - b_part)) + (b_log - b_part)
    b_lse = tl.where((b_max == float("inf")) & (b_picked == b_picked), b_max, b_whole)  # for which the sum is NaN
    b_w = row_weight(weight_ptr, b_target, known, COMPUTE)
    b_z = z_loss * b_w * b_lse * b_lse
    b_loss = b_w * (1.0 - label_smoothing) * ((b_max - b_picked) + b_log) + b_z
    if SMOOTH:
        b_offset += b_w * (b_picked - b_center)
        b_total = load_weight_sum(weight_sum_ptr, n_cols, COMPUTE)
        b_loss += share * (b_total * ((b_max - b_center) + b_log) - b_offset)

    # NaN for a target that is not a class: raising an error would need to synchronize with the GPU.
    b_else = tl.where(counts, float("nan"), 0.0)
    tl.store(loss_ptr + rows, tl.where(known, b_loss, b_else), mask=live)
    if lse_ptr is not None:
        tl.store(lse_ptr + rows, tl.where(known, b_lse, b_else), mask=live)
    if lse_low_ptr is not None:
        tl.store(lse_low_ptr + rows, tl.where(known, b_low, b_else), mask=live)
    if z_ptr is not None:
        tl.store(z_ptr + rows, tl.where(known, b_z, b_else), mask=live)
    return b_lse, b_low


@triton.jit
def finite(x):
    """x, with 0 in place of NaN and infinity."""
    return tl.where((x == x) & (tl.abs(x) != float("inf")), x, 0.0)


@triton.jit
def add_classes(
    b_max, b_sum, b_offset, b_y, b_center, mask, others, cols, weight_ptr, n_cols,
    SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Adds a tile of logits b_y [BLOCK_ROWS, BLOCK_COLS] to the running values of `store_rows`. `others` are the
    classes except the target."""
    b_y = tl.where(mask, b_y, -float("inf"))
    b_new = tl.maximum(b_max, tl.max(b_y, 1))
    b_shift = tl.where(b_new == -float("inf"), 0.0, b_new)
    b_exp = tl.where(others, tl.exp(b_y - b_shift[:, None]), 0.0)
    b_sum = b_sum * tl.exp(b_max - b_shift) + tl.sum(b_exp, 1)
    if SMOOTH:
        b_off = tl.where(others, b_y - b_center[:, None], 0.0)
        if weight_ptr is not None:
            b_off *= tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)[None, :]
        b_offset += tl.sum(b_off, 1)
    return b_new, b_sum, b_offset


@triton.jit(do_not_specialize=_PLAIN)
def cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, loss_ptr, lse_ptr, lse_low_ptr, z_ptr,
    n_rows, n_cols, n1, n2, xs0, xs1, xs2, ignore_index, label_smoothing, share, z_loss, softcap,
    RANK: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Computes the loss, lse, its rounding error and z-loss of each row; pointers to results that are not requested are
    None. `share` is each class's share of the label smoothing."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = rows < n_rows
    b_target = tl.load(target_ptr + rows, mask=live, other=0).to(tl.int64)
    counts = live & (b_target != ignore_index)
    known = counts & (b_target >= 0) & (b_target < n_cols)
    o_x = row_offset(rows, n1, n2, xs0, xs1, xs2, RANK)
    b_picked = capped(tl.load(logits_ptr + o_x + b_target, mask=known, other=0.0).to(COMPUTE), softcap, CAP)
    b_center = finite(b_picked)

    b_max = b_picked
    b_sum = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_offset = tl.zeros([BLOCK_ROWS], COMPUTE)
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = known[:, None] & (cols < n_cols)[None, :]
        b_x = tl.load(logits_ptr + o_x[:, None] + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
        others = mask & (cols[None, :] != b_target[:, None])
        b_max, b_sum, b_offset = add_classes(
            b_max, b_sum, b_offset, capped(b_x, softcap, CAP), b_center, mask, others, cols, weight_ptr, n_cols,
            SMOOTH, COMPUTE,
        )  # fmt: skip

    store_rows(
        b_max, b_sum, b_offset, b_picked, b_center, rows, live, counts, known, b_target, weight_ptr, weight_sum_ptr,
        loss_ptr, lse_ptr, lse_low_ptr, z_ptr, n_cols, label_smoothing, share, z_loss, SMOOTH, COMPUTE,
    )  # fmt: skip


@triton.jit
def _mean(x, total):
    """x / total; 0 if total is 0, unless x is NaN."""
    return tl.where((total == 0.0) & (x == x), 0.0, x / tl.where(total == 0.0, 1.0, total))


@triton.jit(do_not_specialize=[*_PLAIN, "n_cols"])
def cross_entropy_reduce_kernel(
    losses_ptr, zs_ptr, target_ptr, weight_ptr, loss_ptr, z_ptr, total_ptr, n_rows, n_cols, ignore_index,
    MEAN: tl.constexpr, COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sums over the rows and, for a mean, divides by the sum of the weights unless it is 0. There is one program."""
    b_losses, b_zs, b_weights = tl.zeros([BLOCK], COMPUTE), tl.zeros([BLOCK], COMPUTE), tl.zeros([BLOCK], COMPUTE)
    for start in range(0, n_rows, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        live = rows < n_rows
        b_losses += tl.load(losses_ptr + rows, mask=live, other=0.0)
        if zs_ptr is not None:
            b_zs += tl.load(zs_ptr + rows, mask=live, other=0.0)
        if MEAN:
            b_target = tl.load(target_ptr + rows, mask=live, other=0).to(tl.int64)
            known = live & (b_target != ignore_index) & (b_target >= 0) & (b_target < n_cols)
            b_weights += row_weight(weight_ptr, b_target, known, COMPUTE)
    loss, z = tl.sum(b_losses, 0), tl.sum(b_zs, 0)
    if MEAN:
        total = tl.sum(b_weights, 0)
        loss, z = _mean(loss, total), _mean(z, total)
        if total_ptr is not None:
            tl.store(total_ptr, total)
    tl.store(loss_ptr, loss)
    if z_ptr is not None:
        tl.store(z_ptr, z)


@triton.jit
def row_gradients(
    b_lse, b_low, b_picked, known, b_target, weight_ptr, weight_sum_ptr, n_cols, label_smoothing, share, z_loss,
    SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Returns for each row the factor of a class's probability in its gradient, and the target's gradient."""
    b_w = row_weight(weight_ptr, b_target, known, COMPUTE)
    b_nll = (b_lse - b_picked) + b_low
    b_p = tl.exp(-b_nll)
    b_hard = b_w * (1.0 - label_smoothing)
    b_from_z = 2.0 * z_loss * b_w * b_lse
    b_factor = b_hard + b_from_z
    b_at = b_hard * expm1(-b_nll) + b_from_z * b_p
    if SMOOTH:
        weight_sum = load_weight_sum(weight_sum_ptr, n_cols, COMPUTE)
        b_factor += share * weight_sum
        b_at += share * (weight_sum * b_p - b_w)
    return b_factor, b_at


@triton.jit
def class_gradients(
    b_y, cols, b_target, b_lse, b_low, b_factor, b_at, b_dloss, read, unknown, weight_ptr, n_cols, share, softcap,
    CAP: tl.constexpr, SMOOTH: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of logits, from the capped logits b_y and the results of `row_gradients`. It is NaN in
    rows whose target is `unknown`, and 0 in rows that are not `read`."""
    b_v = b_factor[:, None] * tl.exp((b_y - b_lse[:, None]) - b_low[:, None])
    if SMOOTH:
        if weight_ptr is None:
            b_v -= share
        else:
            b_class = tl.load(weight_ptr + cols, mask=cols < n_cols, other=0.0).to(COMPUTE)
            b_v -= share * b_class[None, :]
    b_v = tl.where(cols[None, :] == b_target[:, None], b_at[:, None], b_v) * b_dloss[:, None]
    if CAP:
        b_v *= cap_slope(b_y, softcap)
    return tl.where(read[:, None] | unknown[:, None], b_v, 0.0)


@triton.jit(do_not_specialize=_PLAIN)
def cross_entropy_bwd_kernel(
    dloss_ptr, logits_ptr, target_ptr, weight_ptr, weight_sum_ptr, lse_ptr, lse_low_ptr, total_ptr, dlogits_ptr,
    n_rows, n_cols, n_tiles, n1, n2, xs0, xs1, xs2, ignore_index, label_smoothing, share, z_loss, softcap,
    RANK: tl.constexpr, CAP: tl.constexpr, SMOOTH: tl.constexpr, DLOSS_A_ROW: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    rows = (program // n_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (program % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    live = rows < n_rows
    b_target = tl.load(target_ptr + rows, mask=live, other=0).to(tl.int64)
    counts = live & (b_target != ignore_index)
    known = counts & (b_target >= 0) & (b_target < n_cols)
    if DLOSS_A_ROW:
        b_dloss = tl.load(dloss_ptr + rows, mask=live, other=0.0).to(COMPUTE)
    else:
        b_dloss = tl.load(dloss_ptr).to(COMPUTE) + tl.zeros([BLOCK_ROWS], COMPUTE)
    if total_ptr is not None:
        total = tl.load(total_ptr).to(COMPUTE)
        b_dloss = tl.where(total == 0.0, 0.0, b_dloss / tl.where(total == 0.0, 1.0, total))
    b_dloss = tl.where(known, b_dloss, tl.where(counts, float("nan"), 0.0))
    read = known & (b_dloss != 0.0)

    o_x = row_offset(rows, n1, n2, xs0, xs1, xs2, RANK)
    b_lse = tl.load(lse_ptr + rows, mask=read, other=0.0)
    b_low = tl.load(lse_low_ptr + rows, mask=read, other=0.0)
    b_picked = capped(tl.load(logits_ptr + o_x + b_target, mask=read, other=0.0).to(COMPUTE), softcap, CAP)
    b_factor, b_at = row_gradients(
        b_lse, b_low, b_picked, known, b_target, weight_ptr, weight_sum_ptr, n_cols, label_smoothing, share, z_loss,
        SMOOTH, COMPUTE,
    )  # fmt: skip

    mask = (cols < n_cols)[None, :] & live[:, None]
    b_x = tl.load(logits_ptr + o_x[:, None] + cols[None, :], mask=mask & read[:, None], other=0.0).to(COMPUTE)
    b_v = class_gradients(
        capped(b_x, softcap, CAP), cols, b_target, b_lse, b_low, b_factor, b_at, b_dloss, read, counts & ~known,
        weight_ptr, n_cols, share, softcap, CAP, SMOOTH, COMPUTE,
    )  # fmt: skip
    o_out = (rows * n_cols)[:, None] + cols[None, :]
    tl.store(dlogits_ptr + o_out, round_to(b_v, dlogits_ptr.dtype.element_ty), mask=mask)
