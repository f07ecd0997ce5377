"""The gradients of the inputs, for all chunks at once, from the states and the gradients of the states.

`pairs` computes the gradients of what depends on two tokens of a chunk: the scores of q and k, and the matrix A that is
inverted. That of A needs no derivative of the inverse: it is -dr u^T, where dr is the gradient of the values r that the
inverse is applied to, and u are the corrected values. Then in `dqk`, a program owns a chunk and a block of columns of
one head of q and k. It visits the heads of v that share it in order, so their gradients are summed in registers.

The gradients of g and beta sum over all columns: programs write the sums of their blocks, and `finish` adds these.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels.ops.gated_delta_rule.triton.chunks import (
    between,
    from_start,
    load_decay,
    load_tile,
    load_tokens,
    of_chunk,
    place_of,
    store_tile,
    to_end,
)
from foundry_kernels.ops.gated_delta_rule.triton.products import product

_PLAIN = ("tokens", "n_chunks", "n_documents")


@triton.jit
def _decayed_by(b_pairs, CHUNK: tl.constexpr):
    """What [i, j], the part of a gradient that the decay from token j to token i has, adds to the gradients of the sums
    of decays [CHUNK]. The diagonal has no decay."""
    rows = tl.arange(0, CHUNK)
    b_pairs = tl.where(rows[:, None] == rows[None, :], 0.0, b_pairs)
    return tl.sum(b_pairs, 1) - tl.sum(b_pairs, 0)


@triton.jit(do_not_specialize=_PLAIN)
def gated_delta_rule_pairs_kernel(
    q_ptr, k_ptr, v_ptr, beta_ptr, dout_ptr, decay_ptr, q_norm_ptr, k_norm_ptr, updates_ptr, dr_ptr, cu_seqlens_ptr,
    of_scores_ptr, of_keys_ptr, dv_ptr, sums_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt,
    stride_bb, stride_bh, stride_bt, stride_ob, stride_oh, stride_ot, stride_dvb, stride_dvh, stride_dvt,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes for a chunk and a head of v what [B, H_v, n_chunks, CHUNK, CHUNK] the rows of k are multiplied by for the
    gradient of q, and those of q, by the transpose, for that of k (`of_scores`); the same for matmuls of keys, if
    values are corrected (`of_keys`); and the gradient of v. The first two `sums` [..., B, H_v, T] are the parts of the
    gradients of the sums of decays and of beta that pairs of tokens have."""
    scale = tl.full([], 0.0, COMPUTE) + scale
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    i = tl.program_id(0) // n_heads
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    n_rows = place.n_rows
    batch, first, kv_head = place.batch, place.first, head // group
    WHOLE: tl.constexpr = DV % BLOCK_V == 0
    WHOLE_D: tl.constexpr = D % BLOCK_D == 0
    rows = tl.arange(0, CHUNK)
    o_tokens = (batch * n_heads + head) * tokens + first
    o_square = ((batch * n_heads + head) * n_chunks + place.chunk) * (CHUNK * CHUNK)
    square = rows[:, None] * CHUNK + rows[None, :]
    o_norms = (batch * (n_heads // group) + kv_head) * tokens
    p_q_norm = None if q_norm_ptr is None else q_norm_ptr + o_norms
    p_k_norm = None if k_norm_ptr is None else k_norm_ptr + o_norms
    p_beta = None if beta_ptr is None else beta_ptr + batch * stride_bb + head * stride_bh
    b_beta = load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK, 1.0)
    b_k_norm = load_tokens(p_k_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0)
    p_q = q_ptr + batch * stride_qb + kv_head * stride_qh + first * stride_qt
    p_k = k_ptr + batch * stride_kb + kv_head * stride_kh + first * stride_kt
    p_v = v_ptr + batch * stride_vb + head * stride_vh + first * stride_vt
    p_u = updates_ptr + o_tokens * DV
    p_dr = dr_ptr + o_tokens * DV
    decay = load_decay(decay_ptr, o_tokens, size, n_rows, COMPUTE, CHUNK)
    b_sum = tl.zeros([CHUNK], COMPUTE)

    b_dbeta = tl.zeros([CHUNK], COMPUTE)
    b_da = tl.zeros([CHUNK, CHUNK], COMPUTE)
    for v0 in range(0, DV, BLOCK_V):
        b_dr = load_tile(p_dr + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
        if dv_ptr is not None:
            p_dv = dv_ptr + batch * stride_dvb + head * stride_dvh + first * stride_dvt + v0
            b_dv = round_to(b_dr * b_beta[:, None], dv_ptr.dtype.element_ty)
            store_tile(p_dv, stride_dvt, b_dv, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
        if of_keys_ptr is not None:
            b_u = load_tile(p_u + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
            b_da = product(b_dr, tl.trans(b_u), b_da, KIND, PARTS)
        if sums_ptr is not None and beta_ptr is not None:
            b_v = load_tile(p_v + v0, stride_vt, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
            b_dbeta += tl.sum(b_dr * b_v.to(COMPUTE), 1)
    if of_keys_ptr is not None:
        b_da *= -between(decay, True, CHUNK) * b_k_norm[:, None] * b_k_norm[None, :]
        if sums_ptr is not None:
            b_kk = tl.zeros([CHUNK, CHUNK], COMPUTE)
            for d in range(0, D, BLOCK_D):
                b_k = load_tile(p_k + d, stride_kt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D)
                b_kk = product(b_k, tl.trans(b_k), b_kk, KIND, PARTS)
            b_dbeta += tl.sum(b_da * b_kk, 1)
            b_sum += _decayed_by(b_da * b_kk * b_beta[:, None], CHUNK)
        b_da *= b_beta[:, None]
        # The sum of a triangle without diagonal and its transpose.
        lower = rows[:, None] >= rows[None, :]
        tl.store(of_keys_ptr + o_square + square, b_da, mask=lower)
        tl.store(of_keys_ptr + o_square + rows[None, :] * CHUNK + rows[:, None], b_da, mask=lower)
    if sums_ptr is not None and beta_ptr is not None:
        tl.store(sums_ptr + size + o_tokens + rows, b_dbeta, mask=rows < n_rows)

    b_dp = tl.zeros([CHUNK, CHUNK], COMPUTE)
    p_dout = dout_ptr + batch * stride_ob + head * stride_oh + first * stride_ot
    for v0 in range(0, DV, BLOCK_V):
        b_dout = load_tile(p_dout + v0, stride_ot, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
        b_u = load_tile(p_u + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
        b_dp = product(b_dout, tl.trans(b_u), b_dp, KIND, PARTS)
    # Loaded again: the compiler would keep the differences of its sums in registers from above.
    decay = load_decay(decay_ptr, o_tokens, size, n_rows, COMPUTE, CHUNK)
    b_k_norm = load_tokens(p_k_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0)
    b_q_norm = load_tokens(p_q_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0) * scale
    b_dp *= between(decay, False, CHUNK) * b_q_norm[:, None] * b_k_norm[None, :]
    tl.store(of_scores_ptr + o_square + square, b_dp)
    if sums_ptr is not None:
        b_qk = tl.zeros([CHUNK, CHUNK], COMPUTE)
        for d in range(0, D, BLOCK_D):
            b_q = load_tile(p_q + d, stride_qt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D)
            b_k = load_tile(p_k + d, stride_kt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D)
            b_qk = product(b_q, tl.trans(b_k), b_qk, KIND, PARTS)
        b_sum += _decayed_by(b_qk * b_dp, CHUNK)
        tl.store(sums_ptr + o_tokens + rows, b_sum, mask=rows < n_rows)


@triton.jit(do_not_specialize=_PLAIN)
def gated_delta_rule_dqk_kernel(
    q_ptr, k_ptr, beta_ptr, dout_ptr, decay_ptr, q_norm_ptr, k_norm_ptr, states_ptr, updates_ptr, dstates_ptr, dr_ptr,
    of_scores_ptr, of_keys_ptr, cu_seqlens_ptr, dq_ptr, dk_ptr, sums_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_bb, stride_bh, stride_bt,
    stride_ob, stride_oh, stride_ot, stride_dqb, stride_dqh, stride_dqt, stride_dkb, stride_dkh, stride_dkt,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of q and k; with norms, those of the normalized ones times the norm. After the first two,
    `sums` [2 + 4 * blocks, B, H_v, T] are for each block the parts of other gradients: of the sums of decays, through
    what the outputs read of the state; of beta, through r; of the sums, through the updates in the state at the chunk's
    end; and, one number for a chunk, through that state."""
    scale = tl.full([], 0.0, COMPUTE) + scale
    n_blocks = tl.cdiv(D, BLOCK_D)
    block = tl.program_id(0) % n_blocks
    d = block * BLOCK_D
    n_kv_heads = n_heads // group
    kv_head = (tl.program_id(0) // n_blocks % n_kv_heads).to(tl.int64)
    i = tl.program_id(0) // n_blocks // n_kv_heads
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    n_rows = place.n_rows
    batch, first = place.batch, place.first
    WHOLE_D: tl.constexpr = D % BLOCK_D == 0
    WHOLE: tl.constexpr = DV % BLOCK_V == 0
    rows = tl.arange(0, CHUNK)
    m_rows = rows < n_rows
    square = rows[:, None] * CHUNK + rows[None, :]
    o_norms = (batch * n_kv_heads + kv_head) * tokens
    p_q_norm = None if q_norm_ptr is None else q_norm_ptr + o_norms
    p_k_norm = None if k_norm_ptr is None else k_norm_ptr + o_norms
    p_q = q_ptr + batch * stride_qb + kv_head * stride_qh + first * stride_qt + d
    p_k = k_ptr + batch * stride_kb + kv_head * stride_kh + first * stride_kt + d
    b_q_norm = load_tokens(p_q_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0) * scale
    b_dq = tl.zeros([CHUNK, BLOCK_D], COMPUTE)
    for head in range(kv_head * group, kv_head * group + group):
        o_tokens = (batch * n_heads + head) * tokens + first
        o_chunk = (batch * n_heads + head) * n_chunks + place.chunk
        p_state = states_ptr + o_chunk * (D * DV) + tl.cast(d, tl.int64) * DV
        p_dout = dout_ptr + batch * stride_ob + head * stride_oh + first * stride_ot
        b_dqh = tl.zeros([CHUNK, BLOCK_D], COMPUTE)
        for v0 in range(0, DV, BLOCK_V):
            b_dout = load_tile(p_dout + v0, stride_ot, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
            b_state = load_tile(p_state + v0, DV, D - d, DV - v0, BLOCK_D, BLOCK_V, WHOLE)
            b_dqh = product(b_dout, tl.trans(b_state), b_dqh, KIND, PARTS)
        decay = load_decay(decay_ptr, o_tokens, size, n_rows, COMPUTE, CHUNK)
        b_dqh *= (from_start(decay) * b_q_norm)[:, None]
        if sums_ptr is not None:
            b_q = load_tile(p_q, stride_qt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D).to(COMPUTE)
            p_sums = sums_ptr + (2 + 4 * block.to(tl.int64)) * size + o_tokens
            tl.store(p_sums + rows, tl.sum(b_q * b_dqh, 1), mask=m_rows)
        b_k = load_tile(p_k, stride_kt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D)
        b_of_scores = tl.load(of_scores_ptr + o_chunk * (CHUNK * CHUNK) + square)
        b_dq += product(b_of_scores, b_k, b_dqh, KIND, 2)
    if dq_ptr is not None:
        p_dq = dq_ptr + batch * stride_dqb + kv_head * stride_dqh + first * stride_dqt + d
        b_dq = round_to(b_dq, dq_ptr.dtype.element_ty)
        store_tile(p_dq, stride_dqt, b_dq, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D)

    # Apart, for fewer registers; the states are in the cache.
    b_k_norm = load_tokens(p_k_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0)
    b_dk = tl.zeros([CHUNK, BLOCK_D], COMPUTE)
    for head in range(kv_head * group, kv_head * group + group):
        o_tokens = (batch * n_heads + head) * tokens + first
        o_chunk = (batch * n_heads + head) * n_chunks + place.chunk
        o_state = o_chunk * (D * DV) + tl.cast(d, tl.int64) * DV
        o_square = o_chunk * (CHUNK * CHUNK)
        p_sums = None if sums_ptr is None else sums_ptr + (3 + 4 * block.to(tl.int64)) * size + o_tokens
        decay = load_decay(decay_ptr, o_tokens, size, n_rows, COMPUTE, CHUNK)
        if of_keys_ptr is not None:  # through r = beta (v - from_start k state), and through A
            b_dkh = tl.zeros([CHUNK, BLOCK_D], COMPUTE)
            for v0 in range(0, DV, BLOCK_V):
                b_dr = load_tile(dr_ptr + o_tokens * DV + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
                b_state = load_tile(states_ptr + o_state + v0, DV, D - d, DV - v0, BLOCK_D, BLOCK_V, WHOLE)
                b_dkh = product(b_dr, tl.trans(b_state), b_dkh, KIND, PARTS)
            b_dkh *= -(from_start(decay) * b_k_norm)[:, None]
            b_k = load_tile(p_k, stride_kt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D)
            if sums_ptr is not None:
                tl.store(p_sums + rows, tl.sum(b_k.to(COMPUTE) * b_dkh, 1), mask=m_rows)
            p_beta = None if beta_ptr is None else beta_ptr + batch * stride_bb + head * stride_bh
            b_dk += b_dkh * load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK, 1.0)[:, None]
            b_dk = product(tl.load(of_keys_ptr + o_square + square), b_k, b_dk, KIND, 2)

        # Through the state at the end, and through the outputs.
        b_dkh = tl.zeros([CHUNK, BLOCK_D], COMPUTE)
        b_both = tl.zeros([BLOCK_V], COMPUTE)
        for v0 in range(0, DV, BLOCK_V):
            b_u = load_tile(updates_ptr + o_tokens * DV + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
            b_dstate = load_tile(dstates_ptr + o_state + v0, DV, D - d, DV - v0, BLOCK_D, BLOCK_V, WHOLE)
            if sums_ptr is not None:
                b_state = load_tile(states_ptr + o_state + v0, DV, D - d, DV - v0, BLOCK_D, BLOCK_V, WHOLE)
                b_both += tl.sum(b_state * b_dstate, 0)
            b_dkh = product(b_u, tl.trans(b_dstate), b_dkh, KIND, PARTS)
        b_dkh *= (to_end(decay) * b_k_norm)[:, None]
        if sums_ptr is not None:
            b_k = load_tile(p_k, stride_kt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D)
            tl.store(p_sums + size + rows, tl.sum(b_k.to(COMPUTE) * b_dkh, 1), mask=m_rows)
            tl.store(p_sums + 2 * size, tl.sum(b_both, 0) * of_chunk(decay))
        b_q = load_tile(p_q, stride_qt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D)
        b_of_scores = tl.load(of_scores_ptr + o_square + square)
        b_dk += product(tl.trans(b_of_scores), b_q, b_dkh, KIND, 2)
    if dk_ptr is not None:
        p_dk = dk_ptr + batch * stride_dkb + kv_head * stride_dkh + first * stride_dkt + d
        b_dk = round_to(b_dk, dk_ptr.dtype.element_ty)
        store_tile(p_dk, stride_dkt, b_dk, n_rows, D - d, CHUNK, BLOCK_D, WHOLE_D)
