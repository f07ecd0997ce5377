"""The kernel; see the launchers beside, and the mathematics in `kl_div/__init__`.

Names: `n1, n2, *s` are what `row_offset` needs to find a row; b_ is a block of values, o_ offsets; q is the student's
distribution and p the teacher's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to, row_offset
from foundry_kernels.ops.cross_entropy.triton.kernels import cap_slope, capped

#: The compiler does not specialise on these: it would compile more kernels without making them faster.
_PLAIN = ("n_rows", "n1", "n2", "ignore_index")


@triton.jit
def _add_classes(b_max, b_sum, b_y):
    """Adds logits, minus infinity where there are none, to the largest ones and to the sums of the exponentials below
    these."""
    b_new = tl.maximum(b_max, tl.max(b_y, 1))
    b_shift = tl.where(b_new == -float("inf"), 0.0, b_new)
    return b_new, b_sum * tl.exp(b_max - b_shift) + tl.sum(tl.exp(b_y - b_shift[:, None]), 1)


@triton.jit
def _logits(x_ptr, o_x, cols, mask, scale, softcap, CAP: tl.constexpr, COMPUTE: tl.constexpr):
    b_x = tl.load(x_ptr + o_x[:, None] + cols[None, :], mask=mask, other=0.0).to(COMPUTE)
    return capped(b_x * scale, softcap, CAP)


@triton.jit
def _below(b_y, b_max, b_log):
    """The logarithm of a probability."""
    return (b_y - b_max[:, None]) - b_log[:, None]


@triton.jit
def _in_mixture(b_log_q, b_log_p, beta, rest):
    """log(q / m) and log(p / m) from e^-|d| for the distance d of the logarithms, which does not overflow."""
    b_d = b_log_p - b_log_q
    above = b_d > 0.0
    b_e = tl.exp(-tl.abs(b_d))
    b_share = tl.where(above, rest, beta)
    b_other = tl.where(above, beta, rest)
    # b_other + b_share * b_e, with 1 as the sum of the shares: their float32 numbers may add up to 1 - 2e-8.
    b_log = tl.log(tl.where(b_e > 0.5, 1.0 + b_share * (b_e - 1.0), b_other + b_share * b_e))
    return tl.where(above, -b_d, 0.0) - b_log, tl.where(above, 0.0, b_d) - b_log


@triton.jit
def _sloped(b_v, b_y, writes, softcap, CAP: tl.constexpr):
    """The gradient of logits from that of the capped ones b_y; 0 in other rows."""
    if CAP:
        b_v *= cap_slope(b_y, softcap)
    return tl.where(writes[:, None], b_v, 0.0)


@triton.jit
def _half_sign(b_q, b_p):
    """Half the sign of q - p."""
    return tl.where(b_q < b_p, -0.5, tl.where(b_p < b_q, 0.5, 0.0)).to(b_q.dtype)


@triton.jit
def _unless_0(b_p, b_value, b_otherwise):
    """A class of probability 0 adds nothing, also if a logarithm is infinite."""
    return tl.where(b_p == 0.0, b_otherwise, b_value)


@triton.jit(do_not_specialize=_PLAIN)
def kl_div_kernel(
    logits_ptr, teacher_ptr, target_ptr, dloss_ptr, loss_ptr, dlogits_ptr,
    n_rows, n_cols, n1, n2, xs0, xs1, xs2, ts0, ts1, ts2, ignore_index, scale, softcap, teacher_softcap,
    beta, rest, RANK: tl.constexpr, DIVERGENCE: tl.constexpr, CAP: tl.constexpr, TEACHER_CAP: tl.constexpr,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Stores the loss of each row and, with `dloss_ptr`, the losses' gradient, that of the logits. Each of the two may
    be left out. `dlogits_ptr` [n_rows, n_cols] may be the logits themselves, if they are contiguous.

    The rows are read two or three times: the normalizers; the divergence, with the gradient of the forward one; the
    gradient of the others.
    """
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter truncates a bare float to float32 where a function takes it
    scale, beta, rest = b_zero + scale, b_zero + beta, b_zero + rest
    softcap, teacher_softcap = b_zero + softcap, b_zero + teacher_softcap
    rows = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    live = rows < n_rows
    counts = live & (tl.load(target_ptr + rows, mask=live, other=0).to(tl.int64) != ignore_index)
    o_x = row_offset(rows, n1, n2, xs0, xs1, xs2, RANK)
    o_t = row_offset(rows, n1, n2, ts0, ts1, ts2, RANK)
    o_out = rows * n_cols
    writes = counts
    b_factor = tl.zeros([BLOCK_ROWS], COMPUTE)
    if dloss_ptr is not None:
        b_factor = tl.load(dloss_ptr + rows, mask=counts, other=0.0).to(COMPUTE) * scale
        writes = counts & (b_factor != 0.0)
    reads = counts
    if loss_ptr is None:
        reads = writes

    b_q_max = tl.full([BLOCK_ROWS], -float("inf"), COMPUTE)
    b_q_sum = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_p_max = b_q_max
    b_p_sum = b_q_sum
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        mask = reads[:, None] & (cols < n_cols)[None, :]
        b_y = _logits(logits_ptr, o_x, cols, mask, scale, softcap, CAP, COMPUTE)
        b_q_max, b_q_sum = _add_classes(b_q_max, b_q_sum, tl.where(mask, b_y, -float("inf")))
        b_y = _logits(teacher_ptr, o_t, cols, mask, scale, teacher_softcap, TEACHER_CAP, COMPUTE)
        b_p_max, b_p_sum = _add_classes(b_p_max, b_p_sum, tl.where(mask, b_y, -float("inf")))
    b_q_log = tl.log(tl.where(reads, b_q_sum, 1.0))
    b_p_log = tl.log(tl.where(reads, b_p_sum, 1.0))
    b_q_max = tl.where(reads, b_q_max, 0.0)
    b_p_max = tl.where(reads, b_p_max, 0.0)

    b_loss = tl.zeros([BLOCK_ROWS], COMPUTE)
    b_mean = tl.zeros([BLOCK_ROWS], COMPUTE)  # of the gradient's terms, over the student's distribution
    for start in range(0, n_cols, BLOCK_COLS):
        cols = start + tl.arange(0, BLOCK_COLS)
        inside = (cols < n_cols)[None, :]
        mask = reads[:, None] & inside
        b_y = _logits(logits_ptr, o_x, cols, mask, scale, softcap, CAP, COMPUTE)
        b_log_q = _below(b_y, b_q_max, b_q_log)
        b_a = _logits(teacher_ptr, o_t, cols, mask, scale, teacher_softcap, TEACHER_CAP, COMPUTE)
        b_log_p = _below(b_a, b_p_max, b_p_log)
        b_q = tl.exp(b_log_q)
        b_p = tl.exp(b_log_p)
        if DIVERGENCE == "forward":
            b_terms = _unless_0(b_p, b_p * (b_log_p - b_log_q) + (b_q - b_p), b_q)
            b_loss += tl.sum(tl.where(mask, b_terms, 0.0), 1)
            if dloss_ptr is not None:
                b_v = _sloped(b_factor[:, None] * (b_q - b_p), b_y, writes, softcap, CAP)
                tl.store(
                    dlogits_ptr + o_out[:, None] + cols[None, :], round_to(b_v, dlogits_ptr.dtype.element_ty),
                    mask=live[:, None] & inside,
                )  # fmt: skip
        elif DIVERGENCE == "reverse":
            b_terms = _unless_0(b_q, b_q * (b_log_q - b_log_p) + (b_p - b_q), b_p)
            b_loss += tl.sum(tl.where(mask, b_terms, 0.0), 1)
        elif DIVERGENCE == "tvd":
            b_loss += tl.sum(tl.where(mask, 0.5 * tl.abs(b_q - b_p), 0.0), 1)
            b_mean += tl.sum(tl.where(mask, b_q * _half_sign(b_q, b_p), 0.0), 1)
        else:
            b_in_q, b_in_p = _in_mixture(b_log_q, b_log_p, beta, rest)
            b_mean += tl.sum(tl.where(mask, _unless_0(b_q, b_q * b_in_q, 0.0), 0.0), 1)
            b_loss += tl.sum(tl.where(mask, _unless_0(b_p, b_p * b_in_p, 0.0), 0.0), 1)
    if DIVERGENCE == "jsd":
        b_loss = beta * b_loss + rest * b_mean
    elif DIVERGENCE != "tvd":
        b_mean = b_loss
    if loss_ptr is not None:
        b_loss = tl.where(b_loss < 0.0, 0.0, b_loss)  # by rounding; NaN stays
        tl.store(loss_ptr + rows, tl.where(counts, b_loss, 0.0), mask=live)

    if dloss_ptr is not None and DIVERGENCE != "forward":
        if DIVERGENCE == "jsd":
            b_factor *= rest
        for start in range(0, n_cols, BLOCK_COLS):
            cols = start + tl.arange(0, BLOCK_COLS)
            inside = (cols < n_cols)[None, :]
            mask = writes[:, None] & inside
            b_y = _logits(logits_ptr, o_x, cols, mask, scale, softcap, CAP, COMPUTE)
            b_log_q = _below(b_y, b_q_max, b_q_log)
            b_a = _logits(teacher_ptr, o_t, cols, mask, scale, teacher_softcap, TEACHER_CAP, COMPUTE)
            b_log_p = _below(b_a, b_p_max, b_p_log)
            b_q = tl.exp(b_log_q)
            if DIVERGENCE == "jsd":
                b_ratio, _ = _in_mixture(b_log_q, b_log_p, beta, rest)
            elif DIVERGENCE == "tvd":
                b_ratio = _half_sign(b_q, tl.exp(b_log_p))
            else:
                b_ratio = b_log_q - b_log_p
            b_v = _unless_0(b_q, b_factor[:, None] * (b_q * (b_ratio - b_mean[:, None])), 0.0)
            b_v = _sloped(b_v, b_y, writes, softcap, CAP)
            tl.store(
                dlogits_ptr + o_out[:, None] + cols[None, :], round_to(b_v, dlogits_ptr.dtype.element_ty),
                mask=live[:, None] & inside,
            )  # fmt: skip
