"""The backward kernels. Probabilities are formed again from the scores and lse; nothing is added to by two programs.

`delta`: one number a row. `dkdv`: a program owns a tile of keys of one key-value head and walks the queries of all
heads of its group, so gradients of shared heads are summed in registers. `dq`: a program owns a tile of queries.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton import round_to
from foundry_kernels.ops.flash_attention.triton.tiles import (
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
def flash_attention_delta_kernel(
    g_ptr, out_ptr, lse_ptr, dlse_ptr, sinks_ptr, delta_ptr, dsinks_ptr,
    n_batch, n_heads, n_rows, gs0, gs1, gs2, os0, os1, os2, ls0, ls1, ls2,
    HAS_DLSE: tl.constexpr, NEED_DSINKS: tl.constexpr, COMPUTE: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = g . out - dlse, 0 for rows without keys; and what these rows add to the sinks' gradient, into
    dsinks [tiles of all sequences, H]. Packed rows need not know of sequences."""
    pid = tl.program_id(0)
    head = (pid % n_heads).to(tl.int64)
    n = (pid // n_heads % n_batch).to(tl.int64)
    i0 = pid // n_heads // n_batch * BLOCK_M
    rows = i0 + tl.arange(0, BLOCK_M)  # [M]
    m_rows = rows < n_rows
    far = i0.to(tl.int64)
    b_g = load_rows(g_ptr + n * gs0 + head * gs1 + far * gs2, gs2, n_rows - i0, BLOCK_M, BLOCK_DV, DV, True)
    b_out = load_rows(out_ptr + n * os0 + head * os1 + far * os2, os2, n_rows - i0, BLOCK_M, BLOCK_DV, DV, True)
    at = (n * n_heads + head) * n_rows + rows
    b_lse = tl.load(lse_ptr + at, mask=m_rows, other=-float("inf"))
    b_delta = tl.sum(b_g.to(COMPUTE) * b_out.to(COMPUTE), 1)
    if HAS_DLSE:
        b_delta -= tl.load(dlse_ptr + n * ls0 + head * ls1 + rows.to(tl.int64) * ls2, mask=m_rows, other=0.0)
    b_delta = tl.where(b_lse == -float("inf"), 0.0, b_delta)
    tl.store(delta_ptr + at, b_delta, mask=m_rows)
    if NEED_DSINKS:
        sink = tl.load(sinks_ptr + head).to(COMPUTE)
        b_p = tl.exp2((sink - tl.where(b_lse == -float("inf"), float("inf"), b_lse)) * LOG2E)
        tl.store(dsinks_ptr + pid, -tl.sum(b_p * b_delta, 0))


@triton.jit
def _lse(lse_ptr, m_rows):
    """In log2; +inf where there is nothing to see, so that every probability of the row is 0."""
    b_lse = tl.load(lse_ptr, mask=m_rows, other=-float("inf"))
    return tl.where(b_lse == -float("inf"), float("inf"), b_lse * LOG2E)


@triton.jit
def _gather(
    b_dk, b_dv, b_k, b_v, place, q_ptr, g_ptr, lse_ptr, delta_ptr, qs, gs, begin, end, n_queries, scale, cap, slope,
    left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Take in the queries begin .. end - 1 of one head; `place` [N, 1] is where the keys lie among the queries.

    All blocks of scores are transposed, [N, M]: a product with g or q then needs no transposition of them. Keys beyond
    the last need no mask: they reach only rows of dk and dv that are not stored. Tiles that the window does not cross
    are masked like the others: loops of their own cost more registers, here the scarcest, than the comparison does.
    """
    factor = unit(scale, HAS_CAP, HAS_SLOPES)
    for i0 in range(begin, end, BLOCK_M):
        i0 = tl.multiple_of(i0, BLOCK_M)
        far = tl.cast(i0, tl.int64)
        queries = i0 + tl.arange(0, BLOCK_M)[None, :]  # [1, M]
        m_rows = queries < n_queries
        b_q = load_rows(q_ptr + far * qs, qs, n_queries - i0, BLOCK_M, BLOCK_D, D, True)  # [M, D]
        b_lse = _lse(lse_ptr + queries, m_rows)
        b_s, b_t = scores(dot(b_k, tl.trans(b_q)), place - queries, scale, cap, slope, HAS_CAP, HAS_SLOPES)
        b_z = b_s * factor - b_lse
        if HAS_LEFT or HAS_RIGHT:
            b_z = tl.where(in_window(place - queries, left, right, HAS_LEFT, HAS_RIGHT), b_z, -float("inf"))
        b_p = tl.exp2(b_z)
        b_g = load_rows(g_ptr + far * gs, gs, n_queries - i0, BLOCK_M, BLOCK_DV, DV, True)  # [M, DV]
        if NEED_DV:
            b_dv = dot(round_to(b_p, b_g.dtype), b_g, b_dv)
        if NEED_DK:
            b_delta = tl.load(delta_ptr + queries, mask=m_rows, other=0.0)
            b_ds = b_p * (dot(b_v, tl.trans(b_g)) - b_delta)
            if HAS_CAP:
                b_ds = b_ds * (1.0 - b_t * b_t)
            b_dk = dot(round_to(b_ds, b_q.dtype), b_q, b_dk)
    return b_dk, b_dv


@triton.jit
def flash_attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, starts_q_ptr, starts_k_ptr, slopes_ptr,
    n_batch, n_kv_heads, group, n_queries, n_keys, qs0, qs1, qs2, ks0, ks1, ks2, vs0, vs1, vs2, gs0, gs1, gs2,
    dks0, dks1, dks2, dvs0, dvs1, dvs2, rs0, as0, scale, cap, natural_scale, left, right,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
    COMPUTE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs: key-value heads vary fastest, tiles slowest; under a causal mask the first tiles have most to do."""
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter cuts a bare float to float32 where a function takes it
    scale, cap = b_zero + scale, b_zero + cap
    pid = tl.program_id(0)
    kv_head = (pid % n_kv_heads).to(tl.int64)
    n = (pid // n_kv_heads % n_batch).to(tl.int64)
    q0, queries, k0, keys = locate(n, starts_q_ptr, starts_k_ptr, n_queries, n_keys, VARLEN)
    j0 = pid // n_kv_heads // n_batch * BLOCK_N
    if j0 >= keys:
        return
    first = tl.cast(k0, tl.int64) + j0
    offset = keys - queries if BOTTOM_RIGHT else 0
    place = (j0 + tl.arange(0, BLOCK_N) - offset)[:, None]  # [N, 1]
    b_k = load_rows(k_ptr + n * ks0 + kv_head * ks1 + first * ks2, ks2, keys - j0, BLOCK_N, BLOCK_D, D, True)
    b_v = load_rows(v_ptr + n * vs0 + kv_head * vs1 + first * vs2, vs2, keys - j0, BLOCK_N, BLOCK_DV, DV, True)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], COMPUTE)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], COMPUTE)
    # A key is seen from left of the query to its right, so a query sees the key from its right to its left.
    start, _, _, stop = span(j0, keys, queries, -offset, right, left, HAS_RIGHT, HAS_LEFT, BLOCK_N, BLOCK_M)
    for member in range(group):
        head = kv_head * group + member
        q_h = q_ptr + n * qs0 + head * qs1 + tl.cast(q0, tl.int64) * qs2
        g_h = g_ptr + n * gs0 + head * gs1 + tl.cast(q0, tl.int64) * gs2
        at = n * rs0 + head * n_queries + q0
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(slopes_ptr + n * as0 + head).to(COMPUTE) * LOG2E
        b_dk, b_dv = _gather(
            b_dk, b_dv, b_k, b_v, place, q_h, g_h, lse_ptr + at, delta_ptr + at, qs2, gs2, start, stop, queries,
            scale, cap, slope, left, right, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SLOPES, NEED_DK, NEED_DV,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
        )  # fmt: skip
    if NEED_DK:
        b_dk = round_to(b_dk * natural_scale, dk_ptr.dtype.element_ty)
        p_dk = dk_ptr + n * dks0 + kv_head * dks1 + first * dks2
        store_rows(p_dk, dks2, keys - j0, b_dk, BLOCK_N, BLOCK_D, D)
    if NEED_DV:
        b_dv = round_to(b_dv, dv_ptr.dtype.element_ty)
        p_dv = dv_ptr + n * dvs0 + kv_head * dvs1 + first * dvs2
        store_rows(p_dv, dvs2, keys - j0, b_dv, BLOCK_N, BLOCK_DV, DV)


@triton.jit
def _descend(
    b_dq, b_q, b_g, b_lse, b_delta, place, k_ptr, v_ptr, ks, vs, begin, end, n_keys, scale, cap, slope, left, right,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Take in the keys begin .. end - 1."""
    factor = unit(scale, HAS_CAP, HAS_SLOPES)
    for j0 in range(begin, end, BLOCK_N):
        j0 = tl.multiple_of(j0, BLOCK_N)
        far = tl.cast(j0, tl.int64)
        keys = j0 + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        b_k = load_rows(k_ptr + far * ks, ks, n_keys - j0, BLOCK_N, BLOCK_D, D, MASKED)  # [N, D]
        b_v = load_rows(v_ptr + far * vs, vs, n_keys - j0, BLOCK_N, BLOCK_DV, DV, MASKED)  # [N, DV]
        b_s, b_t = scores(dot(b_q, tl.trans(b_k)), keys - place, scale, cap, slope, HAS_CAP, HAS_SLOPES)
        b_z = b_s * factor - b_lse
        if MASKED:
            m_seen = (keys < n_keys) & in_window(keys - place, left, right, HAS_LEFT, HAS_RIGHT)
            b_z = tl.where(m_seen, b_z, -float("inf"))
        b_ds = tl.exp2(b_z) * (dot(b_g, tl.trans(b_v)) - b_delta)
        if HAS_CAP:
            b_ds = b_ds * (1.0 - b_t * b_t)
        b_dq = dot(round_to(b_ds, b_k.dtype), b_k, b_dq)
    return b_dq


@triton.jit
def flash_attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, dq_ptr, starts_q_ptr, starts_k_ptr, slopes_ptr,
    n_batch, n_heads, group, n_queries, n_keys, qs0, qs1, qs2, ks0, ks1, ks2, vs0, vs1, vs2, gs0, gs1, gs2,
    dqs0, dqs1, dqs2, rs0, as0, scale, cap, natural_scale, left, right,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr, COMPUTE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs as in the forward kernel."""
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
    rows = (i0 + tl.arange(0, BLOCK_M))[:, None]  # [M, 1]
    m_rows = rows < queries
    offset = keys - queries if BOTTOM_RIGHT else 0
    place = rows + offset
    b_q = load_rows(q_ptr + n * qs0 + head * qs1 + first * qs2, qs2, queries - i0, BLOCK_M, BLOCK_D, D, True)
    b_g = load_rows(g_ptr + n * gs0 + head * gs1 + first * gs2, gs2, queries - i0, BLOCK_M, BLOCK_DV, DV, True)
    k_ptr += n * ks0 + head // group * ks1 + tl.cast(k0, tl.int64) * ks2
    v_ptr += n * vs0 + head // group * vs1 + tl.cast(k0, tl.int64) * vs2
    at = n * rs0 + head * n_queries + q0 + rows
    b_lse = _lse(lse_ptr + at, m_rows)
    b_delta = tl.load(delta_ptr + at, mask=m_rows, other=0.0)
    slope = 0.0
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + n * as0 + head).to(COMPUTE) * LOG2E
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], COMPUTE)
    start, full_start, full_stop, stop = span(i0, queries, keys, offset, left, right, HAS_LEFT, HAS_RIGHT,
                                              BLOCK_M, BLOCK_N)  # fmt: skip
    if HAS_LEFT:
        b_dq = _descend(
            b_dq, b_q, b_g, b_lse, b_delta, place, k_ptr, v_ptr, ks2, vs2, start, tl.minimum(full_start, stop), keys,
            scale, cap, slope, left, right, True, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SLOPES,
            D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
    b_dq = _descend(
        b_dq, b_q, b_g, b_lse, b_delta, place, k_ptr, v_ptr, ks2, vs2, full_start, full_stop, keys,
        scale, cap, slope, left, right, False, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SLOPES,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    b_dq = _descend(
        b_dq, b_q, b_g, b_lse, b_delta, place, k_ptr, v_ptr, ks2, vs2, tl.maximum(full_start, full_stop), stop, keys,
        scale, cap, slope, left, right, True, HAS_LEFT, HAS_RIGHT, HAS_CAP, HAS_SLOPES,
        D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    b_dq = round_to(b_dq * natural_scale, dq_ptr.dtype.element_ty)
    p_dq = dq_ptr + n * dqs0 + head * dqs1 + first * dqs2
    store_rows(p_dq, dqs2, queries - i0, b_dq, BLOCK_M, BLOCK_D, D)
