"""The forward kernel: one program a tile of queries of one head, which walks the keys once with a running softmax.

Keys outside of the window are skipped by the bounds of the loops. The tiles that the window's edges cross are masked,
those between are not. Rows are kept by their maximum b_m (in log2), the sum b_l of the weights below it and, for the
entropy, the sum b_e of weight times distance to the maximum: terms of one sign, so nothing cancels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton import round_to
from foundry_kernels.ops.flash_attention.triton.tiles import (
    LN2,
    LOG2E,
    dot,
    in_window,
    load_rows,
    locate,
    scores,
    span,
    store_rows,
    unit,
)


@triton.jit
def _walk(
    b_acc, b_m, b_l, b_e, b_q, place, k_ptr, v_ptr, ks, vs, begin, end, n_keys, scale, cap, slope, left, right,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, STATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take in the keys begin .. end - 1; `place` [M, 1] is where the queries lie among the keys."""
    factor = unit(scale, HAS_CAP, HAS_SLOPES)
    for j0 in range(begin, end, BLOCK_N):
        j0 = tl.multiple_of(j0, BLOCK_N)
        far = tl.cast(j0, tl.int64)
        b_k = load_rows(k_ptr + far * ks, ks, n_keys - j0, BLOCK_N, BLOCK_D, D, MASKED)  # [N, D]
        b_qk = dot(b_q, tl.trans(b_k))  # [M, N]
        keys = j0 + tl.arange(0, BLOCK_N)[None, :]
        b_s, _ = scores(b_qk, keys - place, scale, cap, slope, HAS_CAP, HAS_SLOPES)
        if MASKED:
            m_seen = (keys < n_keys) & in_window(keys - place, left, right, HAS_LEFT, HAS_RIGHT)
            b_s = tl.where(m_seen, b_s, -float("inf"))
        b_new = tl.maximum(b_m, tl.max(b_s, 1) * factor)
        b_base = tl.where(b_new == -float("inf"), 0.0, b_new) if MASKED else b_new
        b_z = b_s * factor - b_base[:, None]
        b_p = tl.exp2(b_z)
        b_shrink = tl.exp2(b_m - b_base)
        if STATS:  # the weight of -inf is 0, and so is its share
            b_fall = tl.maximum(b_m - b_base, -2000.0) * b_l
            b_e = b_shrink * (b_e + b_fall) + tl.sum(b_p * tl.maximum(b_z, -2000.0), 1)
        b_l = b_l * b_shrink + tl.sum(b_p, 1)
        b_m = b_new
        b_v = load_rows(v_ptr + far * vs, vs, n_keys - j0, BLOCK_N, BLOCK_DV, DV, MASKED)  # [N, DV]
        b_acc = dot(round_to(b_p, b_v.dtype), b_v, b_acc * b_shrink[:, None])
    return b_acc, b_m, b_l, b_e


@triton.jit
def flash_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, entropy_ptr, max_ptr, starts_q_ptr, starts_k_ptr, slopes_ptr, sinks_ptr,
    n_batch, n_heads, group, n_queries, n_keys, qs0, qs1, qs2, ks0, ks1, ks2, vs0, vs1, vs2, os0, os1, os2, rs0, as0,
    scale, cap, left, right,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, LSE: tl.constexpr, STATS: tl.constexpr,
    COMPUTE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs: heads vary fastest, tiles slowest. Under a causal mask the last tiles have the most to do and come
    first. `rs0` is the stride of a sequence in lse, entropy and max_logit, `as0` in the slopes."""
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter cuts a bare float to float32 where a function takes it
    scale, cap = b_zero + scale, b_zero + cap
    pid = tl.program_id(0)
    head = (pid % n_heads).to(tl.int64)
    n = (pid // n_heads % n_batch).to(tl.int64)
    tile = pid // n_heads // n_batch
    if HAS_RIGHT:
        tile = tl.num_programs(0) // n_heads // n_batch - 1 - tile
    q0, queries, k0, keys = locate(n, starts_q_ptr, starts_k_ptr, n_queries, n_keys, VARLEN)
    i0 = tile * BLOCK_M
    if i0 >= queries:
        return
    first = tl.cast(q0, tl.int64) + i0
    rows = i0 + tl.arange(0, BLOCK_M)  # [M]
    offset = keys - queries if BOTTOM_RIGHT else 0
    place = (rows + offset)[:, None]
    b_q = load_rows(q_ptr + n * qs0 + head * qs1 + first * qs2, qs2, queries - i0, BLOCK_M, BLOCK_D, D, True)
    k_ptr += n * ks0 + head // group * ks1 + tl.cast(k0, tl.int64) * ks2
    v_ptr += n * vs0 + head // group * vs1 + tl.cast(k0, tl.int64) * vs2
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + n * as0 + head).to(COMPUTE) * LOG2E
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], COMPUTE)
    b_m = tl.full([BLOCK_M], -float("inf"), COMPUTE)
    b_l = tl.zeros([BLOCK_M], COMPUTE)
    b_e = tl.zeros([BLOCK_M], COMPUTE)
    start, full_start, full_stop, stop = span(i0, queries, keys, offset, left, right, HAS_LEFT, HAS_RIGHT,
                                              BLOCK_M, BLOCK_N)  # fmt: skip
    if HAS_LEFT:
        b_acc, b_m, b_l, b_e = _walk(
            b_acc, b_m, b_l, b_e, b_q, place, k_ptr, v_ptr, ks2, vs2, start, tl.minimum(full_start, stop), keys,
            scale, cap, slope, left, right, True, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SLOPES, STATS,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
    b_acc, b_m, b_l, b_e = _walk(
        b_acc, b_m, b_l, b_e, b_q, place, k_ptr, v_ptr, ks2, vs2, full_start, full_stop, keys,
        scale, cap, slope, left, right, False, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SLOPES, STATS,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    b_acc, b_m, b_l, b_e = _walk(
        b_acc, b_m, b_l, b_e, b_q, place, k_ptr, v_ptr, ks2, vs2, tl.maximum(full_start, full_stop), stop, keys,
        scale, cap, slope, left, right, True, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SLOPES, STATS,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    m_empty = b_m == -float("inf")
    m_rows = rows < queries
    at = n * rs0 + head * n_queries + first + tl.arange(0, BLOCK_M)
    if STATS:
        tl.store(max_ptr + at, b_m * LN2, mask=m_rows)
    b_base = tl.where(m_empty, 0.0, b_m)
    b_high = b_base * LN2
    if HAS_SINKS:  # one more outcome, without a value
        logit = tl.load(sinks_ptr + head).to(COMPUTE)
        sink = logit * LOG2E
        b_top = tl.where(m_empty, 0.0, tl.maximum(b_m, sink))
        b_high = tl.where(sink >= b_m, logit, b_high)  # as it was given: not through log2 and back
        b_shrink = tl.exp2(b_base - b_top)
        b_sink = tl.where(m_empty, 0.0, tl.exp2(sink - b_top))
        if STATS:
            b_e = b_shrink * (b_e + (b_base - b_top) * b_l) + b_sink * tl.maximum(sink - b_top, -2000.0)
        b_l = b_l * b_shrink + b_sink
        b_acc = b_acc * b_shrink[:, None]
    b_l = tl.where(m_empty, 1.0, b_l)
    b_out = round_to(b_acc / b_l[:, None], out_ptr.dtype.element_ty)
    p_out = out_ptr + n * os0 + head * os1 + first * os2
    store_rows(p_out, os2, queries - i0, b_out, BLOCK_M, BLOCK_DV, DV)
    if LSE:
        b_lse = tl.where(m_empty, -float("inf"), b_high + tl.log2(b_l) * LN2)
        tl.store(lse_ptr + at, b_lse, mask=m_rows)
    if STATS:
        b_entropy = tl.maximum((tl.log2(b_l) - b_e / b_l) * LN2, 0.0)
        tl.store(entropy_ptr + at, tl.where(m_empty, 0.0, b_entropy), mask=m_rows)
