"""The kernels; see the launchers beside, and the mathematics in `log_probs/__init__`.

Logits are of some classes, first, first + 1, ..., and may be of all: the forward kernel carries its sums from one block
of classes to the next. Names: `n1, n2, *s` are what `row_offset` needs to find a row; b_ is a block of values, o_
offsets, and a target's logit is `picked`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to, row_offset
from foundry_kernels.ops.cross_entropy.triton.kernels import cap_slope, capped, expm1, log1p, row_targets

#: The compiler does not specialise on these: it would compile more kernels without making them faster.
_PLAIN = ("n_rows", "first", "n1", "n2", "ignore_index")


@triton.jit
def _distance(b_y, b_lse):
    """b_y - b_lse, but a finite number in place of minus infinity: it is multiplied by a probability of 0."""
    b_below = b_y - b_lse
    return tl.where(b_below == -float("inf"), 0.0, b_below)


@triton.jit(do_not_specialize=_PLAIN)
def log_probs_fwd_kernel(
    logits_ptr, target_ptr, state_ptr, log_probs_ptr, entropy_ptr, lse_ptr, lse_low_ptr, stats_ptr,
    n_rows, n_cols, n_out, first, n1, n2, xs0, xs1, xs2, ignore_index, logit_scale, softcap,
    RANK: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr, STATS: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Adds these n_out of n_cols classes to the sums of each row, and with `log_probs_ptr` stores the results that have
    a pointer.

    Without `state_ptr` these are all classes. With it [n, n_rows] carries the largest logit m, the sum of exp(y - m) of
    all but the target, and the target's logit from one block of classes to the next; with ENTROPY the sum of exp(y - m)
    (y - m); and with STATS the target's logit and the largest before it and of all others, before the soft cap, under
    which different ones may become equal, and the sums of y and exp(y - m)^2 of all but the target.
    """
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter truncates a bare float to float32 where a function takes it
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_target, live, counts, known = row_targets(target_ptr, rows, n_rows, n_cols, ignore_index)
    o_x = row_offset(rows, n1, n2, xs0, xs1, xs2, RANK)
    b_at = b_target - first
    here = known & (b_at >= 0) & (b_at < n_out)
    b_own_x = tl.load(logits_ptr + o_x + b_at, mask=here, other=0.0).to(COMPUTE) * (b_zero + logit_scale)
    b_picked = capped(b_own_x, b_zero + softcap, CAP)

    b_max = tl.where(known & ~here, -float("inf"), b_picked)
    b_sum = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_products = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_before = tl.full([BLOCK_ROWS], -float("inf"), COMPUTE)
    b_others = tl.full([BLOCK_ROWS], -float("inf"), COMPUTE)
    b_total = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_squares = tl.zeros([BLOCK_ROWS], COMPUTE)
    if state_ptr is not None:
        state = state_ptr + rows
        old = known & (b_at < b_target)  # first > 0, of as many values as rows: Triton 3.9 interprets no other mask
        b_max = tl.where(old, tl.load(state, mask=old, other=-float("inf")), b_max)
        b_sum = tl.load(state + n_rows, mask=old, other=0.0)
        b_picked = tl.where(here, b_picked, tl.load(state + 2 * n_rows, mask=old, other=0.0))
        if ENTROPY:
            b_products = tl.load(state + 3 * n_rows, mask=old, other=0.0)
        if STATS:
            state += (3 + ENTROPY) * n_rows
            b_own_x = tl.where(here, b_own_x, tl.load(state, mask=old, other=0.0))
            b_before = tl.load(state + n_rows, mask=old, other=-float("inf"))
            b_others = tl.load(state + 2 * n_rows, mask=old, other=-float("inf"))
            b_total = tl.load(state + 3 * n_rows, mask=old, other=0.0)
            b_squares = tl.load(state + 4 * n_rows, mask=old, other=0.0)

    for start in range(0, n_out, BLOCK_COLS):
        out = start + tl.arange(0, BLOCK_COLS)
        mask = known[:, None] & (out < n_out)[None, :]
        b_x = tl.load(logits_ptr + o_x[:, None] + out[None, :], mask=mask, other=0.0).to(COMPUTE)
        b_x *= b_zero + logit_scale
        b_y = tl.where(mask, capped(b_x, b_zero + softcap, CAP), -float("inf"))
        b_new = tl.maximum(b_max, tl.max(b_y, 1))
        b_shift = tl.where(b_new == -float("inf"), 0.0, b_new)
        b_scale = tl.exp(b_max - b_shift)
        others = mask & (out[None, :] != b_at[:, None])
        b_exp = tl.where(others, tl.exp(b_y - b_shift[:, None]), 0.0)
        if ENTROPY:
            # Without a finite logit so far, the sums are 0.
            b_step = tl.where(b_max == -float("inf"), 0.0, b_max - b_shift)
            b_products = b_scale * (b_products + b_step * b_sum)
            b_products += tl.sum(b_exp * _distance(b_y, b_shift[:, None]), 1)
        if STATS:
            b_other = tl.where(others, b_x, -float("inf"))
            b_others = tl.maximum(b_others, tl.max(b_other, 1))
            before = out[None, :] < b_at[:, None]
            b_before = tl.maximum(b_before, tl.max(tl.where(before, b_other, -float("inf")), 1))
            b_total += tl.sum(tl.where(others, b_y, 0.0), 1)
            b_squares = b_squares * (b_scale * b_scale) + tl.sum(b_exp * b_exp, 1)
        b_sum = b_sum * b_scale + tl.sum(b_exp, 1)
        b_max = b_new

    if log_probs_ptr is None:
        state = state_ptr + rows
        tl.store(state, b_max, mask=known)
        tl.store(state + n_rows, b_sum, mask=known)
        tl.store(state + 2 * n_rows, b_picked, mask=known)
        if ENTROPY:
            tl.store(state + 3 * n_rows, b_products, mask=known)
        if STATS:
            state += (3 + ENTROPY) * n_rows
            tl.store(state, b_own_x, mask=known)
            tl.store(state + n_rows, b_before, mask=known)
            tl.store(state + 2 * n_rows, b_others, mask=known)
            tl.store(state + 3 * n_rows, b_total, mask=known)
            tl.store(state + 4 * n_rows, b_squares, mask=known)
    else:
        b_top = b_max == b_picked
        b_own = tl.where(b_top, 1.0, tl.exp(b_picked - b_max))
        b_log = tl.where(b_top, log1p(b_sum), tl.log(b_sum + b_own))
        b_whole = b_max + b_log
        b_part = b_whole - b_max
        b_low = (b_max - (b_whole - b_part)) + (b_log - b_part)
        b_lse = tl.where((b_max == float("inf")) & (b_picked == b_picked), b_max, b_whole)  # there the sum is NaN

        # NaN for a target that is no class: a GPU cannot raise an error without waiting for it.
        b_else = tl.where(counts, float("nan"), 0.0)
        tl.store(log_probs_ptr + rows, tl.where(known, (b_picked - b_max) - b_log, b_else), mask=live)
        if ENTROPY:
            b_far = tl.where(b_top | (b_own == 0.0), 0.0, b_picked - b_max)
            b_entropy = b_log - (b_products + b_own * b_far) / (b_sum + b_own)  # neither term is negative
            tl.store(entropy_ptr + rows, tl.where(known, b_entropy, b_else), mask=live)
        if lse_ptr is not None:
            tl.store(lse_ptr + rows, tl.where(known, b_lse, b_else), mask=live)
        if lse_low_ptr is not None:
            tl.store(lse_low_ptr + rows, tl.where(known, b_low, b_else), mask=live)
        if STATS:
            b_top1 = ((b_own_x > b_before) & (b_own_x >= b_others) & (b_log == b_log)).to(COMPUTE)
            b_mean = (b_total + b_picked) / n_cols
            b_log_squares = tl.log(b_squares + b_own * b_own) - 2.0 * b_log
            stats = stats_ptr + 3 * rows
            tl.store(stats, tl.where(known, b_top1, b_else), mask=live)
            tl.store(stats + 1, tl.where(known, b_mean, b_else), mask=live)
            tl.store(stats + 2, tl.where(known, b_log_squares, b_else), mask=live)


@triton.jit(do_not_specialize=_PLAIN)
def log_probs_bwd_kernel(
    g_ptr, c_ptr, b_ptr, logits_ptr, target_ptr, lse_ptr, lse_low_ptr, dlogits_ptr,
    n_rows, n_cols, n_out, n_tiles, first, n1, n2, xs0, xs1, xs2, ignore_index, logit_scale, softcap,
    RANK: tl.constexpr, CAP: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of a tile of logits, from the numbers g, c and b of each row; it may be written over them."""
    b_zero = tl.full([], 0.0, COMPUTE)
    rows = (tl.program_id(0) // n_tiles).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    out = (tl.program_id(0) % n_tiles) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
    b_target, live, counts, known = row_targets(target_ptr, rows, n_rows, n_cols, ignore_index)
    b_g = tl.load(g_ptr + rows, mask=known, other=0.0).to(COMPUTE)
    b_c = tl.zeros([BLOCK_ROWS], COMPUTE)
    if c_ptr is not None:
        b_c += tl.load(c_ptr + rows, mask=known, other=0.0).to(COMPUTE)
    b_b = tl.zeros([BLOCK_ROWS], COMPUTE)
    if b_ptr is not None:
        b_b += tl.load(b_ptr + rows, mask=known, other=0.0).to(COMPUTE)
    read = known & ((b_g != 0.0) | (b_c != 0.0) | (b_b != 0.0))

    o_x = row_offset(rows, n1, n2, xs0, xs1, xs2, RANK)
    mask = (out < n_out)[None, :] & live[:, None]
    b_x = tl.load(logits_ptr + o_x[:, None] + out[None, :], mask=mask & read[:, None], other=0.0).to(COMPUTE)
    b_y = capped(b_x * (b_zero + logit_scale), b_zero + softcap, CAP)
    b_lse = tl.load(lse_ptr + rows, mask=read, other=0.0)
    b_low = tl.load(lse_low_ptr + rows, mask=read, other=0.0)
    b_below = (b_y - b_lse[:, None]) - b_low[:, None]
    b_p = tl.exp(b_below)
    # expm1 keeps the target's 1 - p exact where p is near 1.
    is_target = (first + out)[None, :] == b_target[:, None]
    b_from_g = tl.where(is_target, -expm1(tl.minimum(b_below, 0.0)), -b_p)
    b_factor = b_c[:, None]
    if b_ptr is not None:
        b_factor = b_factor + b_b[:, None] * tl.where(b_below == -float("inf"), 0.0, b_below)
    b_v = (b_g[:, None] * b_from_g + b_p * b_factor) * (b_zero + logit_scale)
    if CAP:
        b_v *= cap_slope(b_y, b_zero + softcap)
    b_else = tl.where(counts & ~known, float("nan"), 0.0)
    b_v = tl.where(read[:, None], b_v, b_else[:, None])
    o_out = (rows * n_out)[:, None] + out[None, :]
    tl.store(dlogits_ptr + o_out, round_to(b_v, dlogits_ptr.dtype.element_ty), mask=mask)
