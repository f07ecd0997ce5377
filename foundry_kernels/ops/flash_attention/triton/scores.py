"""Scores from the dot products q.k: scale, soft cap, ALiBi. They are in units of log2(e), see `softmax`. If a bias is
added or a score function is called later, they are in natural units.

This is the only code of the kernels that knows how a score is made. `score` has the numbers and `HAS` the constants of
`kernel_options`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from foundry_kernels._triton.functions import tanh
from foundry_kernels.ops.flash_attention.triton.bundles import Modifier
from foundry_kernels.ops.flash_attention.triton.softmax import LOG2E


class Scoring(NamedTuple):
    """What turns matmul results into scores; a number is not used if its option is off."""

    scale: Any
    softcap: Any
    slope: Any  # ALiBi's, for one head or for each row [M, 1]


@triton.jit
def load_scoring(score, COMPUTE: tl.constexpr):
    """The `Scoring` of a program, without a slope."""
    b_zero = tl.full([], 0.0, COMPUTE)  # where the interpreter assigns a bare float, it rounds it to float32
    return Scoring(b_zero + score.scale, b_zero + score.softcap, b_zero)


@triton.jit
def of_head(scoring, score, alibi_slopes_ptr, n, head, HAS: tl.constexpr):
    """The `Scoring` of one head, or of each row's head [M, 1], of sequence n."""
    slope = scoring.slope
    if HAS.alibi:
        slope = tl.load(alibi_slopes_ptr + n * score.stride_alibi + head).to(scoring.scale.dtype)
        if not HAS.natural:
            slope = slope * LOG2E
    return Scoring(scoring.scale, scoring.softcap, slope)


@triton.jit
def scores(b_qk, rel_pos, scoring, HAS: tl.constexpr):
    """(b_s, b_t): the scores and, for `product_gradient`, the hyperbolic tangent of the soft cap.

    Without a cap, ALiBi, a bias or a score function, b_s is b_qk itself, which the caller multiplies by `score_factor`.
    `rel_pos` is the key's position minus the query's, after alignment.
    """
    b_t = b_qk
    if HAS.softcap:
        b_t = tanh(b_qk * scoring.scale)
        b_s = b_t * scoring.softcap
    elif HAS.alibi or HAS.natural:
        b_s = b_qk * scoring.scale
    else:
        b_s = b_qk
    if HAS.alibi:
        b_s -= scoring.slope * tl.abs(rel_pos).to(b_s.dtype)
    return b_s, b_t


@triton.jit
def score_factor(scoring, HAS: tl.constexpr):
    """The factor for the result of `scores`. In units of log2(e) the multiplication is free, as part of the
    subtraction before exp2."""
    if HAS.natural:
        return tl.full([], LOG2E, scoring.scale.dtype)
    elif HAS.softcap or HAS.alibi:
        return 1.0
    else:
        return scoring.scale


@triton.jit
def product_gradient(b_ds, b_t, HAS: tl.constexpr):
    """The gradient of the scaled dot products from that of the scores."""
    if HAS.softcap:
        b_ds = b_ds * (1.0 - b_t * b_t)
    return b_ds


@triton.jit
def modifier_of(
    n, head, at, heads_ptr, n_heads, pointers, layout, HAS: tl.constexpr, PREPARE: tl.constexpr, COMPUTE: tl.constexpr
):  # fmt: skip
    """The `Modifier` of one head, or of each row's head [M, 1], of sequence n. `heads_ptr` has the numbers of heads in
    the whole of which they are a shard."""
    b, h = tl.cast(n, tl.int32), tl.cast(head, tl.int32)
    if HAS.global_heads:
        place = tl.load(heads_ptr + n * n_heads + head)
        b, h = (place >> 32).to(tl.int32), place.to(tl.int32)
    ready = PREPARE(Modifier(b, h, at, pointers, layout, b), COMPUTE)
    return Modifier(b, h, at, pointers, layout, ready)


@triton.jit
def changed_gradient(b_ds, slope):
    """The gradient of the scores before a score function. A pair without weight has none, whatever the slope is."""
    if len(slope.shape) == 0:
        return b_ds * slope
    else:
        return tl.where(b_ds == 0.0, b_ds, b_ds * slope)
