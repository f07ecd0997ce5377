"""The backward kernels. Probabilities are recomputed from the scores and lse; but for ADD_DQ no two programs write to
one element.

`preprocess`: what the others read of each row. `dkdv`: a program owns a tile of keys of one key-value head and visits
the queries of all heads of its group, so the gradients of shared heads are summed in registers. Where that makes too
few programs, each visits some heads of its group alone, and `sum_splits` adds what they leave. `dq`: a program owns a
tile of queries. With ADD_DQ `dkdv` takes the place of `dq` too and adds to dq in memory, five products in place of
seven, but in an order that differs from run to run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import dot, round_to
from foundry_kernels.ops.flash_attention.triton.block_range import block_range
from foundry_kernels.ops.flash_attention.triton.mask import between, in_window, seen_keys
from foundry_kernels.ops.flash_attention.triton.order import program_order
from foundry_kernels.ops.flash_attention.triton.scores import load_slope, score_factor, scores
from foundry_kernels.ops.flash_attention.triton.seqlen_info import seqlen_info
from foundry_kernels.ops.flash_attention.triton.softmax import LOG2E, split
from foundry_kernels.ops.flash_attention.triton.tile_io import add_rows, load_rows, store_rows


@triton.jit
def flash_attention_preprocess_kernel(
    dout_ptr, out_ptr, lse_ptr, dlse_ptr, sinks_ptr, delta_ptr, lse_log2_ptr, lse_low_ptr, dsinks_ptr,
    n_batch, n_heads, tokens_q,
    stride_dob, stride_doh, stride_dot, stride_ob, stride_oh, stride_ot, stride_dlseb, stride_dlseh, stride_dlset,
    HAS_DLSE: tl.constexpr, NEED_DSINKS: tl.constexpr, LSE_LOW: tl.constexpr, COMPUTE: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Of each row delta = dout . out - dlse, 0 where it sees no key, and lse in units of log2(e), +inf where it sees no
    key, so that all its probabilities are 0; and these rows' part of the gradient of the sinks, into dsinks [tiles of
    all sequences, H]. Packed sequences are one sequence here: rows do not depend on each other.

    LSE_LOW: for float32 lse comes in float64 and is handed on in two parts. In one, a score of 200 would have a
    probability that is off by 1e-5, and not the one of the forward pass.
    """
    pid = tl.program_id(0)
    head = (pid % n_heads).to(tl.int64)
    n = (pid // n_heads % n_batch).to(tl.int64)
    i0 = pid // n_heads // n_batch * BLOCK_M
    rows = i0 + tl.arange(0, BLOCK_M)  # [M]
    m_rows = rows < tokens_q
    first = i0.to(tl.int64)
    p_dout = dout_ptr + n * stride_dob + head * stride_doh + first * stride_dot
    b_dout = load_rows(p_dout, stride_dot, tokens_q - i0, BLOCK_M, BLOCK_DV, DV, True)
    p_out = out_ptr + n * stride_ob + head * stride_oh + first * stride_ot
    b_out = load_rows(p_out, stride_ot, tokens_q - i0, BLOCK_M, BLOCK_DV, DV, True)
    at = (n * n_heads + head) * tokens_q + rows
    b_lse = tl.load(lse_ptr + at, mask=m_rows, other=-float("inf"))
    b_delta = tl.sum(b_dout.to(COMPUTE) * b_out.to(COMPUTE), 1)
    if HAS_DLSE:
        p_dlse = dlse_ptr + n * stride_dlseb + head * stride_dlseh + rows.to(tl.int64) * stride_dlset
        b_delta -= tl.load(p_dlse, mask=m_rows, other=0.0)
    b_delta = tl.where(b_lse == -float("inf"), 0.0, b_delta)
    tl.store(delta_ptr + at, b_delta, mask=m_rows)
    b_lse = tl.where(b_lse == -float("inf"), float("inf"), b_lse).to(tl.float64)
    b_high, b_low = split(b_lse * LOG2E, COMPUTE)
    tl.store(lse_log2_ptr + at, b_high, mask=m_rows)
    if LSE_LOW:
        tl.store(lse_low_ptr + at, b_low, mask=m_rows)
    if NEED_DSINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float64)
        b_p = tl.exp2(((sink - b_lse) * LOG2E).to(COMPUTE))
        tl.store(dsinks_ptr + pid, -tl.sum(b_p * b_delta, 0))


@triton.jit
def _hide(b_z, i0, k_pos, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
          BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):  # fmt: skip
    """The transposed scores [N, M] of the queries from i0 on, -inf where they do not see the key at k_pos [N, 1]. Of
    three ways to the same, the one that does not spill."""
    rows = tl.arange(0, BLOCK_M)[None, :]
    if BLOCK_D > 128:
        m_seen = in_window(k_pos - (i0 + rows), left, right, HAS_LEFT, HAS_RIGHT)
    elif HAS_SOFTCAP:
        m_seen = between(rows, k_pos - right - i0, k_pos + left - i0, HAS_RIGHT, HAS_LEFT)
    else:
        m_seen = between(i0 + rows, k_pos - right, k_pos + left, HAS_RIGHT, HAS_LEFT)
    return tl.where(m_seen, b_z, -float("inf"))


@triton.jit
def _accumulate_dkdv(
    b_dk, b_dv, b_k, b_v, k_pos, q_ptr, dout_ptr, lse_log2_ptr, lse_low_ptr, delta_ptr, dq_ptr, stride_qt, stride_dot,
    begin, full_begin, full_end, end, seqlen_q, scale, softcap, slope, left, right,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr,
    LSE_LOW: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, ADD_DQ: tl.constexpr,
    DELTA_FIRST: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Add the queries begin .. end - 1 of one head; k_pos [N, 1] is the position of each key among the queries.

    All blocks of scores are transposed, [N, M], so that dout and q need no transposition. Keys past the last one need
    no mask: they reach only rows of dk and dv that are not stored; with ADD_DQ they are out of every query's sight. Nor
    do the queries full_begin .. full_end - 1, whose tiles the window's edges do not cross; a loop of their own would
    cost registers, which are scarcest here.
    """
    factor = score_factor(scale, HAS_SOFTCAP, HAS_ALIBI)
    for i0 in range(begin, end, BLOCK_M):
        i0 = tl.multiple_of(i0, BLOCK_M)
        first = tl.cast(i0, tl.int64)
        rows = i0 + tl.arange(0, BLOCK_M)[None, :]  # [1, M]
        m_rows = rows < seqlen_q
        b_q = load_rows(q_ptr + first * stride_qt, stride_qt, seqlen_q - i0, BLOCK_M, BLOCK_D, D, True)  # [M, D]
        b_lse = tl.load(lse_log2_ptr + rows, mask=m_rows, other=float("inf"))
        if DELTA_FIRST:  # not where it is used: of two ways to the same, the one that does not spill
            b_delta = tl.load(delta_ptr + rows, mask=m_rows, other=0.0)
        b_s, b_t = scores(dot(b_k, tl.trans(b_q)), k_pos - rows, scale, softcap, slope, HAS_SOFTCAP, HAS_ALIBI)
        b_z = b_s * factor - b_lse
        if LSE_LOW:
            b_z -= tl.load(lse_low_ptr + rows, mask=m_rows, other=0.0)
        if HAS_LEFT or HAS_RIGHT:
            if BLOCK_D > 128 or HAS_SOFTCAP:  # noqa: SIM114, this is known to the compiler. A branch takes registers
                b_z = _hide(b_z, i0, k_pos, left, right, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BLOCK_D, BLOCK_M)
            elif (i0 < full_begin) | (i0 >= full_end):
                b_z = _hide(b_z, i0, k_pos, left, right, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, BLOCK_D, BLOCK_M)
        b_p = tl.exp2(b_z)
        p_dout = dout_ptr + first * stride_dot
        b_dout = load_rows(p_dout, stride_dot, seqlen_q - i0, BLOCK_M, BLOCK_DV, DV, True)  # [M, DV]
        if NEED_DV:
            b_dv = dot(round_to(b_p, b_dout.dtype), b_dout, b_dv)
        if NEED_DK:
            if not DELTA_FIRST:
                b_delta = tl.load(delta_ptr + rows, mask=m_rows, other=0.0)
            b_ds = b_p * (dot(b_v, tl.trans(b_dout)) - b_delta)
            if HAS_SOFTCAP:
                b_ds = b_ds * (1.0 - b_t * b_t)
            b_ds = round_to(b_ds, b_q.dtype)
            b_dk = dot(b_ds, b_q, b_dk)
            if ADD_DQ:
                add_rows(dq_ptr + first * D, D, seqlen_q - i0, dot(tl.trans(b_ds), b_k), BLOCK_M, BLOCK_D, D)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["section"])
def flash_attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_log2_ptr, lse_low_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr,
    n_batch, n_shares, members, num_splits, section, tokens_q, tokens_k,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_dob, stride_doh, stride_dot, stride_dkb, stride_dkh, stride_dks, stride_dvb, stride_dvh, stride_dvs,
    stride_lseb, stride_alibi, scale, softcap, natural_scale, left, right,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, LSE_LOW: tl.constexpr, NEED_DK: tl.constexpr,
    NEED_DV: tl.constexpr, ADD_DQ: tl.constexpr, COMPUTE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Under a causal mask the first tiles have most to do, and of packed sequences those with most tiles after them:
    they come first in their section. ADD_DQ: dq is [B, H, tokens, D] in COMPUTE, holds zeros before, and is still to be
    multiplied by `natural_scale`; it needs HAS_RIGHT.

    A share is `members` query heads of one key-value head, each of which has `num_splits` shares and as many heads in
    dk and dv."""
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter truncates a bare float to float32 where a function takes it
    scale, softcap = b_zero + scale, b_zero + softcap
    n, share, tile, tiles = program_order(n_batch, n_shares, section)
    kv_head = share // num_splits
    start_q, seqlen_q, start_k, seqlen_k = seqlen_info(
        n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN
    )
    if VARLEN and HAS_RIGHT:
        tile -= tiles - tl.cdiv(seqlen_k, BLOCK_N)
    j0 = tile * BLOCK_N
    if j0 < 0 or j0 >= seqlen_k:
        return
    first = tl.cast(start_k, tl.int64) + j0
    offset = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    k_pos = (j0 + tl.arange(0, BLOCK_N) - offset)[:, None]  # [N, 1]
    p_k = k_ptr + n * stride_kb + kv_head * stride_kh + first * stride_ks
    b_k = load_rows(p_k, stride_ks, seqlen_k - j0, BLOCK_N, BLOCK_D, D, True)
    p_v = v_ptr + n * stride_vb + kv_head * stride_vh + first * stride_vs
    b_v = load_rows(p_v, stride_vs, seqlen_k - j0, BLOCK_N, BLOCK_DV, DV, True)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], COMPUTE)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], COMPUTE)
    # Seen from a key the window is mirrored: the queries that see it lie from `right` before to `left` after it.
    start, full_start, full_stop, stop = block_range(
        j0, seqlen_k, seqlen_q, -offset, right, left, HAS_RIGHT, HAS_LEFT, BLOCK_N, BLOCK_M
    )
    if ADD_DQ and j0 + BLOCK_N > seqlen_k:  # what is no key is so far to the right that no query sees it
        k_pos = tl.where((j0 + tl.arange(0, BLOCK_N) < seqlen_k)[:, None], k_pos, 1 << 30)
        full_start = stop
    DELTA_FIRST: tl.constexpr = ADD_DQ or (
        VARLEN and D == 128 and DV == 128 and not HAS_SOFTCAP and not HAS_ALIBI and not LSE_LOW
    )
    for head in range(share * members, share * members + members):
        q_h = q_ptr + n * stride_qb + head * stride_qh + tl.cast(start_q, tl.int64) * stride_qt
        dout_h = dout_ptr + n * stride_dob + head * stride_doh + tl.cast(start_q, tl.int64) * stride_dot
        dq_h = None
        if ADD_DQ:
            dq_h = dq_ptr + (n * stride_lseb + head * tokens_q + start_q) * D  # its rows lie as those of lse do
        at = n * stride_lseb + head * tokens_q + start_q
        slope = load_slope(alibi_slopes_ptr, stride_alibi, n, head, HAS_ALIBI, COMPUTE)
        b_dk, b_dv = _accumulate_dkdv(
            b_dk, b_dv, b_k, b_v, k_pos, q_h, dout_h, lse_log2_ptr + at, lse_low_ptr + at if LSE_LOW else None,
            delta_ptr + at, dq_h, stride_qt, stride_dot, start, full_start, full_stop, stop, seqlen_q,
            scale, softcap, slope, left, right, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, LSE_LOW,
            NEED_DK, NEED_DV, ADD_DQ, DELTA_FIRST, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M,
        )  # fmt: skip
    if NEED_DK:
        b_dk = round_to(b_dk * natural_scale, dk_ptr.dtype.element_ty)
        p_dk = dk_ptr + n * stride_dkb + share * stride_dkh + first * stride_dks
        store_rows(p_dk, stride_dks, seqlen_k - j0, b_dk, BLOCK_N, BLOCK_D, D)
    if NEED_DV:
        b_dv = round_to(b_dv, dv_ptr.dtype.element_ty)
        p_dv = dv_ptr + n * stride_dvb + share * stride_dvh + first * stride_dvs
        store_rows(p_dv, stride_dvs, seqlen_k - j0, b_dv, BLOCK_N, BLOCK_DV, DV)


@triton.jit
def flash_attention_sum_splits_kernel(
    parts_ptr, sum_ptr, n_heads, num_splits, tokens, stride_sb, stride_sh, stride_st, scale,
    COMPUTE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dk or dv: `scale` times the sum of what the shares of each key-value head left, [B, Hk, splits, tokens, D], in
    their order. Packed sequences are one sequence here."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(tokens, BLOCK_M)
    i0 = pid % tiles * BLOCK_M
    head = (pid // tiles % n_heads).to(tl.int64)
    n = (pid // tiles // n_heads).to(tl.int64)
    first = tl.cast(i0, tl.int64)
    stride_split = tl.cast(tokens, tl.int64) * D
    p_parts = parts_ptr + (n * n_heads + head) * num_splits * stride_split + first * D
    b_sum = tl.zeros([BLOCK_M, BLOCK_D], COMPUTE)
    for _ in range(num_splits):
        b_sum += load_rows(p_parts, D, tokens - i0, BLOCK_M, BLOCK_D, D, True)
        p_parts += stride_split
    b_sum = round_to(b_sum * scale, sum_ptr.dtype.element_ty)
    p_sum = sum_ptr + n * stride_sb + head * stride_sh + first * stride_st
    store_rows(p_sum, stride_st, tokens - i0, b_sum, BLOCK_M, BLOCK_D, D)


@triton.jit
def _accumulate_dq(
    b_dq, b_q, b_dout, b_lse, b_low, b_delta, q_pos, k_ptr, v_ptr, stride_ks, stride_vs, begin, end, seqlen_k,
    scale, softcap, slope, left, right,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, LSE_LOW: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the keys begin .. end - 1."""
    factor = score_factor(scale, HAS_SOFTCAP, HAS_ALIBI)
    for j0 in range(begin, end, BLOCK_N):
        j0 = tl.multiple_of(j0, BLOCK_N)
        first = tl.cast(j0, tl.int64)
        cols = j0 + tl.arange(0, BLOCK_N)[None, :]  # [1, N]
        b_k = load_rows(k_ptr + first * stride_ks, stride_ks, seqlen_k - j0, BLOCK_N, BLOCK_D, D, MASKED)  # [N, D]
        b_v = load_rows(v_ptr + first * stride_vs, stride_vs, seqlen_k - j0, BLOCK_N, BLOCK_DV, DV, MASKED)  # [N, DV]
        b_s, b_t = scores(dot(b_q, tl.trans(b_k)), cols - q_pos, scale, softcap, slope, HAS_SOFTCAP, HAS_ALIBI)
        b_z = b_s * factor - b_lse
        if LSE_LOW:
            b_z -= b_low
        if MASKED:
            m_seen = seen_keys(j0, BLOCK_N, q_pos, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
            b_z = tl.where(m_seen, b_z, -float("inf"))
        b_ds = tl.exp2(b_z) * (dot(b_dout, tl.trans(b_v)) - b_delta)
        if HAS_SOFTCAP:
            b_ds = b_ds * (1.0 - b_t * b_t)
        b_dq = dot(round_to(b_ds, b_k.dtype), b_k, b_dq)
    return b_dq


@triton.jit(do_not_specialize=["section"])
def flash_attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_log2_ptr, lse_low_ptr, delta_ptr, dq_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr,
    n_batch, n_heads, group, section, tokens_q, tokens_k,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_dob, stride_doh, stride_dot, stride_dqb, stride_dqh, stride_dqt,
    stride_lseb, stride_alibi, scale, softcap, natural_scale, left, right,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, LSE_LOW: tl.constexpr, COMPUTE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs are ordered as in the forward kernel."""
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter truncates a bare float to float32 where a function takes it
    scale, softcap = b_zero + scale, b_zero + softcap
    n, head, tile, tiles = program_order(n_batch, n_heads, section)
    if HAS_RIGHT:
        tile = tiles - 1 - tile
    start_q, seqlen_q, start_k, seqlen_k = seqlen_info(
        n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN
    )
    i0 = tile * BLOCK_M
    if i0 >= seqlen_q:
        return
    first = tl.cast(start_q, tl.int64) + i0
    rows = (i0 + tl.arange(0, BLOCK_M))[:, None]  # [M, 1]
    m_rows = rows < seqlen_q
    offset = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    q_pos = rows + offset
    p_q = q_ptr + n * stride_qb + head * stride_qh + first * stride_qt
    b_q = load_rows(p_q, stride_qt, seqlen_q - i0, BLOCK_M, BLOCK_D, D, True)
    p_dout = dout_ptr + n * stride_dob + head * stride_doh + first * stride_dot
    b_dout = load_rows(p_dout, stride_dot, seqlen_q - i0, BLOCK_M, BLOCK_DV, DV, True)
    k_ptr += n * stride_kb + head // group * stride_kh + tl.cast(start_k, tl.int64) * stride_ks
    v_ptr += n * stride_vb + head // group * stride_vh + tl.cast(start_k, tl.int64) * stride_vs
    at = n * stride_lseb + head * tokens_q + start_q + rows
    b_lse = tl.load(lse_log2_ptr + at, mask=m_rows, other=float("inf"))
    b_low = tl.load(lse_low_ptr + at, mask=m_rows, other=0.0) if LSE_LOW else None
    b_delta = tl.load(delta_ptr + at, mask=m_rows, other=0.0)
    slope = load_slope(alibi_slopes_ptr, stride_alibi, n, head, HAS_ALIBI, COMPUTE)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], COMPUTE)
    start, full_start, full_stop, stop = block_range(i0, seqlen_q, seqlen_k, offset, left, right, HAS_LEFT, HAS_RIGHT,
                                                     BLOCK_M, BLOCK_N)  # fmt: skip
    if HAS_LEFT:
        b_dq = _accumulate_dq(
            b_dq, b_q, b_dout, b_lse, b_low, b_delta, q_pos, k_ptr, v_ptr, stride_ks, stride_vs,
            start, tl.minimum(full_start, stop), seqlen_k, scale, softcap, slope, left, right,
            True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, LSE_LOW, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
        )  # fmt: skip
    b_dq = _accumulate_dq(
        b_dq, b_q, b_dout, b_lse, b_low, b_delta, q_pos, k_ptr, v_ptr, stride_ks, stride_vs,
        full_start, full_stop, seqlen_k, scale, softcap, slope, left, right,
        False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, LSE_LOW, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    b_dq = _accumulate_dq(
        b_dq, b_q, b_dout, b_lse, b_low, b_delta, q_pos, k_ptr, v_ptr, stride_ks, stride_vs,
        tl.maximum(full_start, full_stop), stop, seqlen_k, scale, softcap, slope, left, right,
        True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, LSE_LOW, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N,
    )  # fmt: skip
    b_dq = round_to(b_dq * natural_scale, dq_ptr.dtype.element_ty)
    p_dq = dq_ptr + n * stride_dqb + head * stride_dqh + first * stride_dqt
    store_rows(p_dq, stride_dqt, seqlen_q - i0, b_dq, BLOCK_M, BLOCK_D, D)
