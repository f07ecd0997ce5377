"""Scores from the dot products q.k: scale, soft cap, ALiBi. They are in units of log2(e), see `softmax`. If a bias is
added later, they are in natural units like the bias."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import tanh
from foundry_kernels.ops.flash_attention.triton.softmax import LOG2E


@triton.jit
def scores(b_qk, rel_pos, scoring):
    """(b_s, b_t): the scores and, for the derivative of the soft cap, its hyperbolic tangent.

    Without a cap, ALiBi or a bias, b_s is b_qk itself, which the caller multiplies by `score_factor`. `rel_pos` is the
    key's position minus the query's, after alignment.
    """
    b_t = b_qk
    if scoring.softcap is not None:
        b_t = tanh(b_qk * scoring.scale)
        b_s = b_t * scoring.softcap
    elif scoring.slope is not None or scoring.bias is not None:
        b_s = b_qk * scoring.scale
    else:
        b_s = b_qk
    if scoring.slope is not None:
        b_s -= scoring.slope * tl.abs(rel_pos).to(b_s.dtype)
    return b_s, b_t


@triton.jit
def score_factor(scoring):
    """The factor for the result of `scores`. Without a bias the multiplication is free, as part of the subtraction
    before exp2."""
    if scoring.bias is not None:
        return tl.full([], LOG2E, scoring.scale.dtype)
    elif scoring.softcap is not None or scoring.slope is not None:
        return 1.0
    else:
        return scoring.scale


@triton.jit
def load_slope(alibi_slopes_ptr, stride_alibi, n, head, HAS_BIAS: tl.constexpr, COMPUTE: tl.constexpr):
    """The ALiBi slope of one head of sequence n, in the units of the scores."""
    slope = tl.load(alibi_slopes_ptr + n * stride_alibi + head).to(COMPUTE)
    return slope if HAS_BIAS else slope * LOG2E
