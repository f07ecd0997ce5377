"""The running softmax of a tile of rows.

Scores are in units of log2(e), so that every exponential is one `exp2`. A row's `State` is its maximum m, the sum l of
the weights relative to it and, for the entropy, the sum e of weight times distance to the maximum: its terms have the
same sign, so there is no cancellation.

With a bias (HAS_BIAS) scores may be so large that their product with log2(e) overflows, and its rounding error is not
small. They and the maximum are then in natural units, and only differences are multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels.ops.flash_attention.triton.bundles import State

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def powers(b_s, factor, b_base, HAS_BIAS: tl.constexpr):
    """The powers of 2 that the weights of the scores b_s are, relative to a logit b_base of their rows; factor: see
    `score_factor`."""
    return (b_s - b_base) * factor if HAS_BIAS else b_s * factor - b_base


@triton.jit
def fall(b_m, b_base, HAS_BIAS: tl.constexpr):
    """Returns the difference of two maxima, in the unit of base-2 exponents."""
    return (b_m - b_base) * LOG2E if HAS_BIAS else b_m - b_base


@triton.jit
def online_softmax(b_s, factor, state, MASKED: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_STATS: tl.constexpr):
    """Adds the scores b_s, of unit `factor`, to the state: (the weights b_p, the factor for earlier sums, the new
    state)."""
    b_m, b_l, b_e = state
    b_top = tl.max(b_s, 1)
    b_new = tl.maximum(b_m, b_top if HAS_BIAS else b_top * factor)
    b_base = tl.where(b_new == -float("inf"), 0.0, b_new) if MASKED else b_new
    b_z = powers(b_s, factor, b_base[:, None], HAS_BIAS)
    b_p = tl.exp2(b_z)
    b_fall = fall(b_m, b_base, HAS_BIAS)
    b_shrink = tl.exp2(b_fall)
    if SAVE_STATS:  # a weight of 0 must not meet -inf
        b_fall = tl.maximum(b_fall, -2000.0) * b_l
        b_e = b_shrink * (b_e + b_fall) + tl.sum(b_p * tl.maximum(b_z, -2000.0), 1)
    b_l = b_l * b_shrink + tl.sum(b_p, 1)
    return b_p, b_shrink, State(b_new, b_l, b_e)


@triton.jit
def add_sink(logit, m_empty, b_base, b_l, b_e, SAVE_STATS: tl.constexpr):
    """Adds the sink, a key without a value, to the state of rows with the maximum b_base, a float64 in natural units:
    (the factor for earlier sums, the new b_base, b_l, b_e). It does not change rows that see no key."""
    sink = logit.to(tl.float64)
    b_top = tl.where(m_empty, b_base, tl.maximum(b_base, sink))
    b_fall, b_sink_fall = ((b_base - b_top) * LOG2E).to(b_l.dtype), ((sink - b_top) * LOG2E).to(b_l.dtype)
    b_shrink = tl.exp2(b_fall)
    b_sink = tl.where(m_empty, 0.0, tl.exp2(b_sink_fall))
    if SAVE_STATS:  # a weight of 0 must not meet -inf
        b_e = b_shrink * (b_e + tl.maximum(b_fall, -2000.0) * b_l) + b_sink * tl.maximum(b_sink_fall, -2000.0)
    b_l = b_l * b_shrink + b_sink
    return b_shrink, b_top, b_l, b_e


@triton.jit
def _lse_scale(b_m):
    """What multiplies the logarithm of a sum in lse, see `join_lse`."""
    return tl.maximum(tl.abs(b_m.to(tl.float64)) * 4.656612873077393e-10, 1.0)


@triton.jit
def join_lse(b_m, b_log, SCALED: tl.constexpr):
    """lse from the largest logit and the logarithm of the sum relative to it, float64 in natural units.

    Beside a maximum beyond 2^31, which a bias may cause, a float64 would lose the logarithm, and the backward pass
    would compute weights that are larger by the sum. So, with SCALED, the logarithm is scaled with the maximum, which
    is a float32. It is still too small to change lse as a float32."""
    return b_m + b_log * _lse_scale(b_m) if SCALED else b_m + b_log


@triton.jit
def split_lse(b_lse, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """(high, low) of float64 lse, each rounded to DTYPE: high in the unit of scores, low in units of log2(e)."""
    b_lse = b_lse if HAS_BIAS else b_lse * LOG2E
    high = b_lse.to(DTYPE)
    m_finite = tl.abs(high) < float("inf")
    low = tl.where(m_finite, b_lse, 0.0) - tl.where(m_finite, high, 0.0)
    if HAS_BIAS:
        low = low / _lse_scale(tl.where(m_finite, high, 0.0)) * LOG2E
    return high, low.to(DTYPE)
