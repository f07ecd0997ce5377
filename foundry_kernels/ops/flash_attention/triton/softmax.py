"""The running softmax of a tile of rows.

Scores are in units of log2(e), so that every exponential is one `exp2`. A row's `State` is its maximum m, the sum l of
the weights relative to it and, for the entropy, the sum e of weight times distance to the maximum: its terms have the
same sign, so there is no cancellation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels.ops.flash_attention.triton.bundles import State

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def online_softmax(b_s, factor, state, MASKED: tl.constexpr, SAVE_STATS: tl.constexpr):
    """Adds the scores b_s * factor to the state: (the weights b_p, the factor for earlier sums, the new state)."""
    b_m, b_l, b_e = state
    b_new = tl.maximum(b_m, tl.max(b_s, 1) * factor)
    b_base = tl.where(b_new == -float("inf"), 0.0, b_new) if MASKED else b_new
    b_z = b_s * factor - b_base[:, None]
    b_p = tl.exp2(b_z)
    b_shrink = tl.exp2(b_m - b_base)
    if SAVE_STATS:  # a weight of 0 must not meet -inf
        b_fall = tl.maximum(b_m - b_base, -2000.0) * b_l
        b_e = b_shrink * (b_e + b_fall) + tl.sum(b_p * tl.maximum(b_z, -2000.0), 1)
    b_l = b_l * b_shrink + tl.sum(b_p, 1)
    return b_p, b_shrink, State(b_new, b_l, b_e)


@triton.jit
def add_sink(logit, b_m, b_base, b_l, b_e, SAVE_STATS: tl.constexpr):
    """Adds the sink, a key without a value, to the state: (the factor for earlier sums, the new base, b_l, b_e). b_base
    is b_m, or 0 for rows that see no key, which the sink does not change."""
    m_empty = b_m == -float("inf")
    sink, low = split(logit.to(tl.float64) * LOG2E, b_m.dtype)
    b_top = tl.where(m_empty, 0.0, tl.maximum(b_m, sink))
    b_shrink = tl.exp2(b_base - b_top)
    b_fall = (sink - b_top) + low
    b_sink = tl.where(m_empty, 0.0, tl.exp2(b_fall))
    if SAVE_STATS:
        b_e = b_shrink * (b_e + (b_base - b_top) * b_l) + b_sink * tl.maximum(b_fall, -2000.0)
    b_l = b_l * b_shrink + b_sink
    return b_shrink, b_top, b_l, b_e


@triton.jit
def split(x, DTYPE: tl.constexpr):
    """(high, low) of a float64, each rounded to DTYPE; high + low has about twice the precision of high."""
    high = x.to(DTYPE)
    m_finite = tl.abs(x) < float("inf")
    low = tl.where(m_finite, x, 0.0) - tl.where(m_finite, high, 0.0)
    return high, low.to(DTYPE)
