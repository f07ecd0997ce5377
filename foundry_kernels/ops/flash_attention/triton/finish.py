"""Writes the results of rows that have seen all their keys."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels.ops.flash_attention.triton.softmax import LN2, add_sink, join_lse


@triton.jit
def finish_rows(
    b_acc, state, m_rows, head, p_out, at, results, sinks_ptr,
    HAS_BIAS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Computes the results from the sums b_acc [M, DV] and the softmax state [M]. Writes out to the rows p_out [M, 1]
    and the other results to `at` [M]. `head` is the head of all rows, or of each row [M]. A NaN in a bias makes all
    results of its row NaN. Maxima ignore NaN, so with HAS_BIAS they are set to NaN explicitly."""
    b_m, b_l, b_e = state
    m_empty = b_l == 0.0 if HAS_BIAS else b_m == -float("inf")
    if results.max_logit is not None:
        b_top = b_m if HAS_BIAS else b_m * LN2
        if HAS_BIAS:
            b_top = tl.where((b_l != b_l) & (b_m < float("inf")), b_l, b_top)
        tl.store(results.max_logit + at, b_top, mask=m_rows)
    b_base = tl.where(m_empty, 0.0, b_m).to(tl.float64)
    if not HAS_BIAS:
        b_base = b_base * LN2
    if sinks_ptr is not None:
        logit = tl.load(sinks_ptr + head)
        b_shrink, b_base, b_l, b_e = add_sink(logit, m_empty, b_base, b_l, b_e, results.entropy is not None)
        b_acc = b_acc * b_shrink[:, None]
    b_l = tl.where(m_empty, 1.0, b_l)
    b_out = round_to(b_acc / b_l[:, None], p_out.dtype.element_ty)
    cols = tl.arange(0, BLOCK_DV)[None, :]
    tl.store(p_out + cols, b_out, mask=m_rows[:, None] & (cols < DV))
    if results.lse is not None:
        SCALED: tl.constexpr = HAS_BIAS and b_l.dtype == tl.float32
        b_lse = join_lse(b_base, tl.log2(b_l).to(tl.float64) * LN2, SCALED)
        tl.store(results.lse + at, tl.where(m_empty, -float("inf"), b_lse), mask=m_rows)
    if results.entropy is not None:
        b_entropy = tl.maximum((tl.log2(b_l) - b_e / b_l) * LN2, 0.0)
        if HAS_BIAS:
            b_entropy = tl.where(b_l != b_l, b_l, b_entropy)
        tl.store(results.entropy + at, tl.where(m_empty, 0.0, b_entropy), mask=m_rows)
