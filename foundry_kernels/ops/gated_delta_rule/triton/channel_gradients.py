"""The gradients of the inputs with a decay for each dimension of a key, for all chunks at once.

`pairs` computes the gradients of the products of two tokens. In `dqk`, a program owns 16 tokens and a block of columns
of one head of q and k, and visits the heads of v that share it in order. The gradient of a token's g adds up what each
decay that spans the token has, and no difference of sums over all of them, which would cancel: of pairs of a block,
pairs with one token in it, pairs around it, and in `finish` of what the states before and after the chunk have.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels.ops.gated_delta_rule.triton.channels import (
    PLAIN,
    after,
    before,
    load_sum,
    load_sums,
)
from foundry_kernels.ops.gated_delta_rule.triton.chunks import load_tile, load_tokens, place_of, store_tile
from foundry_kernels.ops.gated_delta_rule.triton.products import product


@triton.jit(do_not_specialize=PLAIN)
def gated_delta_rule_channel_pairs_kernel(
    v_ptr, beta_ptr, dout_ptr, k_start_ptr, keys_ptr, states_ptr, updates_ptr, dr_ptr, cu_seqlens_ptr,
    of_scores_ptr, of_keys_ptr, dv_ptr, dbeta_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    stride_vb, stride_vh, stride_vt, stride_bb, stride_bh, stride_bt, stride_ob, stride_oh, stride_ot,
    stride_dvb, stride_dvh, stride_dvt,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes for a chunk and a head of v the gradients of the products of queries and keys, and of keys and keys, [B,
    H_v, n_chunks, CHUNK, CHUNK], and those of v and beta."""
    i = tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    batch, first, n_rows = place.batch, place.first, place.n_rows
    WHOLE: tl.constexpr = DV % BLOCK_V == 0
    rows = tl.arange(0, CHUNK)
    o_tokens = (batch * n_heads + head) * tokens + first
    o_chunk = (batch * n_heads + head) * n_chunks + place.chunk
    square = o_chunk * (CHUNK * CHUNK) + rows[:, None] * CHUNK + rows[None, :]
    p_beta = None if beta_ptr is None else beta_ptr + batch * stride_bb + head * stride_bh
    b_beta = load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK, 1.0)
    p_v = v_ptr + batch * stride_vb + head * stride_vh + first * stride_vt
    p_dout = dout_ptr + batch * stride_ob + head * stride_oh + first * stride_ot
    p_u = updates_ptr + o_tokens * DV
    p_dr = dr_ptr + o_tokens * DV
    if dv_ptr is not None or dbeta_ptr is not None:
        b_dbeta = tl.zeros([CHUNK], COMPUTE)
        for v0 in range(0, DV, BLOCK_V):
            b_dr = load_tile(p_dr + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
            if dv_ptr is not None:
                p_dv = dv_ptr + batch * stride_dvb + head * stride_dvh + first * stride_dvt + v0
                b_dv = round_to(b_dr * b_beta[:, None], dv_ptr.dtype.element_ty)
                store_tile(p_dv, stride_dvt, b_dv, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
            if dbeta_ptr is not None:
                b_known = tl.zeros([CHUNK, BLOCK_V], COMPUTE)
                if keys_ptr is not None:  # what beta multiplies: v without what the state and the tokens before know
                    for d in range(0, D, BLOCK_D):
                        p_k = k_start_ptr + o_tokens * D + d
                        b_k = load_tile(p_k, D, n_rows, D - d, CHUNK, BLOCK_D, D % BLOCK_D == 0)
                        p_state = states_ptr + o_chunk * (D * DV) + tl.cast(d, tl.int64) * DV + v0
                        b_state = load_tile(p_state, DV, D - d, DV - v0, BLOCK_D, BLOCK_V, WHOLE)
                        b_known = product(b_k, b_state, b_known, KIND, PARTS)
                    b_u = load_tile(p_u + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
                    b_known = product(tl.load(keys_ptr + square), b_u, b_known, KIND, PARTS)
                b_v = load_tile(p_v + v0, stride_vt, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
                b_dbeta += tl.sum(b_dr * (b_v.to(COMPUTE) - b_known), 1)
        if dbeta_ptr is not None:
            b_dbeta = round_to(b_dbeta, dbeta_ptr.dtype.element_ty)
            tl.store(dbeta_ptr + o_tokens + rows, b_dbeta, mask=rows < n_rows)
    if of_keys_ptr is not None:
        b_keys = tl.zeros([CHUNK, CHUNK], COMPUTE)
        for v0 in range(0, DV, BLOCK_V):
            b_dr = load_tile(p_dr + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
            b_u = load_tile(p_u + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
            b_keys = product(b_dr, tl.trans(b_u), b_keys, KIND, PARTS)
        b_keys = tl.where(rows[:, None] > rows[None, :], -b_keys * b_beta[:, None], 0.0)
        tl.store(of_keys_ptr + square, b_keys)
    b_scores = tl.zeros([CHUNK, CHUNK], COMPUTE)
    for v0 in range(0, DV, BLOCK_V):
        b_dout = load_tile(p_dout + v0, stride_ot, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
        b_u = load_tile(p_u + v0, DV, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
        b_scores = product(b_dout, tl.trans(b_u), b_scores, KIND, PARTS)
    tl.store(of_scores_ptr + square, tl.where(rows[:, None] >= rows[None, :], b_scores, 0.0))


@triton.jit
def _sums_before(b_x, KIND: tl.constexpr, COMPUTE: tl.constexpr, ROWS: tl.constexpr):
    """The sums of the rows before each row. A difference of sums would not be exact for tiny ones."""
    rows = tl.arange(0, ROWS)
    b_before = tl.where(rows[:, None] > rows[None, :], 1.0, 0.0).to(COMPUTE)
    return product(b_before, b_x, tl.zeros_like(b_x), KIND, 3)


@triton.jit
def _rows_of(
    ptr, stride, p_norm, factor, row, n_rows, n_cols,
    COMPUTE: tl.constexpr, BLOCK_D: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """16 rows of q or k times their norms and a factor."""
    b_norm = load_tokens(p_norm, row, 1, n_rows - row, COMPUTE, 16, 1.0) * factor
    b_x = load_tile(ptr + row * stride, stride, n_rows - row, n_cols, 16, BLOCK_D, WHOLE).to(COMPUTE)
    return b_x * b_norm[:, None]


@triton.jit(do_not_specialize=PLAIN)
def gated_delta_rule_channel_dqk_kernel(
    q_ptr, k_ptr, beta_ptr, dout_ptr, sums_ptr, q_norm_ptr, k_norm_ptr, states_ptr, updates_ptr, dstates_ptr, dr_ptr,
    of_scores_ptr, of_keys_ptr, cu_seqlens_ptr, dq_ptr, dk_ptr, parts_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_bb, stride_bh, stride_bt,
    stride_ob, stride_oh, stride_ot, stride_dqb, stride_dqh, stride_dqt, stride_dkb, stride_dkh, stride_dkt,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of q and k; with norms, those of the normalized ones times the norm. `parts` [3, B, H_v, T,
    D] are parts of the gradient of g: through decays of pairs, complete; through decays from the chunk's start to the
    token; and through those from the token to the chunk's end."""
    scale = tl.full([], 0.0, COMPUTE) + scale
    unit = tl.full([], 1.0, COMPUTE)
    BLOCKS: tl.constexpr = CHUNK // 16
    n_blocks = tl.cdiv(D, BLOCK_D)
    d = tl.program_id(0) % n_blocks * BLOCK_D
    block = tl.program_id(0) // n_blocks % BLOCKS
    n_kv_heads = n_heads // group
    kv_head = (tl.program_id(0) // n_blocks // BLOCKS % n_kv_heads).to(tl.int64)
    i = tl.program_id(0) // n_blocks // BLOCKS // n_kv_heads
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    row = block * 16
    n_rows = place.n_rows
    if row >= n_rows:
        return
    batch, first = place.batch, place.first
    left, n_cols = n_rows - row, D - d
    WHOLE_D: tl.constexpr = D % BLOCK_D == 0
    WHOLE: tl.constexpr = DV % BLOCK_V == 0
    rows = tl.arange(0, 16)
    tile = rows[:, None] * CHUNK + rows[None, :]
    o_norms = (batch * n_kv_heads + kv_head) * tokens + first
    p_q_norm = None if q_norm_ptr is None else q_norm_ptr + o_norms
    p_k_norm = None if k_norm_ptr is None else k_norm_ptr + o_norms
    p_q = q_ptr + batch * stride_qb + kv_head * stride_qh + first * stride_qt + d
    p_k = k_ptr + batch * stride_kb + kv_head * stride_kh + first * stride_kt + d
    b_q = _rows_of(p_q, stride_qt, p_q_norm, scale, row, n_rows, n_cols, COMPUTE, BLOCK_D, WHOLE_D)
    b_k = _rows_of(p_k, stride_kt, p_k_norm, unit, row, n_rows, n_cols, COMPUTE, BLOCK_D, WHOLE_D)
    b_dq = tl.zeros([16, BLOCK_D], COMPUTE)
    b_dk = tl.zeros([16, BLOCK_D], COMPUTE)
    for head in range(kv_head * group, kv_head * group + group):
        o_tokens = (batch * n_heads + head) * tokens + first
        o_chunk = (batch * n_heads + head) * n_chunks + place.chunk
        o_state = o_chunk * (D * DV) + tl.cast(d, tl.int64) * DV
        p_sums = sums_ptr + o_tokens * D + d
        p_dout = dout_ptr + batch * stride_ob + head * stride_oh + (first + row) * stride_ot
        p_scores = of_scores_ptr + o_chunk * (CHUNK * CHUNK)
        p_keys = None if of_keys_ptr is None else of_keys_ptr + o_chunk * (CHUNK * CHUNK)
        own = load_sums(p_sums, size, row, n_rows, n_cols, D, 16, BLOCK_D)

        # Through the states.
        b_of_q = tl.zeros([16, BLOCK_D], COMPUTE)
        b_of_k = tl.zeros([16, BLOCK_D], COMPUTE)
        b_of_r = tl.zeros([16, BLOCK_D], COMPUTE)
        for v0 in range(0, DV, BLOCK_V):
            b_state = tl.trans(load_tile(states_ptr + o_state + v0, DV, n_cols, DV - v0, BLOCK_D, BLOCK_V, WHOLE))
            b_dout = load_tile(p_dout + v0, stride_ot, left, DV - v0, 16, BLOCK_V, WHOLE)
            b_of_q = product(b_dout, b_state, b_of_q, KIND, PARTS)
            if of_keys_ptr is not None:
                b_dr = load_tile(dr_ptr + (o_tokens + row) * DV + v0, DV, left, DV - v0, 16, BLOCK_V, WHOLE)
                b_of_r = product(b_dr, b_state, b_of_r, KIND, PARTS)
        for v0 in range(0, DV, BLOCK_V):
            b_dstate = tl.trans(load_tile(dstates_ptr + o_state + v0, DV, n_cols, DV - v0, BLOCK_D, BLOCK_V, WHOLE))
            b_u = load_tile(updates_ptr + (o_tokens + row) * DV + v0, DV, left, DV - v0, 16, BLOCK_V, WHOLE)
            b_of_k = product(b_u, b_dstate, b_of_k, KIND, PARTS)
        b_start = tl.exp(own.high + own.low)
        b_of_q *= b_start
        b_of_k *= before(load_sum(p_sums, size, n_rows - 1, n_rows, n_cols, D, BLOCK_D), own)
        b_from_start = b_of_q * b_q
        p_parts = None if parts_ptr is None else parts_ptr + (o_tokens + row) * D + d
        if parts_ptr is not None:
            store_tile(p_parts + 2 * size * D, D, b_of_k * b_k, left, n_cols, 16, BLOCK_D, WHOLE_D)
        if of_keys_ptr is not None:
            p_beta = None if beta_ptr is None else beta_ptr + batch * stride_bb + head * stride_bh
            b_beta = load_tokens(p_beta, first + row, stride_bt, left, COMPUTE, 16, 1.0)
            b_of_r *= b_start * -b_beta[:, None]
            b_from_start += b_of_r * b_k
            b_of_k += b_of_r
        if parts_ptr is not None:
            store_tile(p_parts + size * D, D, b_from_start, left, n_cols, 16, BLOCK_D, WHOLE_D)

        # Through the products with the keys of the blocks before.
        b_part = tl.zeros([16, BLOCK_D], COMPUTE)
        if block > 0:
            start = load_sum(p_sums, size, row - 1, n_rows, n_cols, D, BLOCK_D)
            b_rows_q = tl.zeros([16, BLOCK_D], COMPUTE)
            b_rows_k = tl.zeros([16, BLOCK_D], COMPUTE)
            for other in range(block):
                at = other * 16
                b_other = _rows_of(p_k, stride_kt, p_k_norm, unit, at, n_rows, n_cols, COMPUTE, BLOCK_D, WHOLE_D)
                b_other *= before(start, load_sums(p_sums, size, at, n_rows, n_cols, D, 16, BLOCK_D))
                b_rows_q = product(tl.load(p_scores + row * CHUNK + at + tile), b_other, b_rows_q, KIND, PARTS)
                if of_keys_ptr is not None:
                    b_rows_k = product(tl.load(p_keys + row * CHUNK + at + tile), b_other, b_rows_k, KIND, PARTS)
            b_decay = after(own, start)
            b_rows_q *= b_decay
            b_rows_k *= b_decay
            b_of_q += b_rows_q
            b_of_k += b_rows_k
            b_part += tl.cumsum(b_rows_q * b_q + b_rows_k * b_k, 0, reverse=True)

        # With the rows of the blocks after, and the pairs of tokens around the block.
        if left > 16:
            end = load_sum(p_sums, size, row + 15, n_rows, n_cols, D, BLOCK_D)
            b_columns = tl.zeros([16, BLOCK_D], COMPUTE)
            b_across = tl.zeros([BLOCK_D], COMPUTE)
            for later in range(block + 1, tl.cdiv(n_rows, 16)):
                at = later * 16
                sums = load_sums(p_sums, size, at, n_rows, n_cols, D, 16, BLOCK_D)
                b_decay = after(sums, end)
                b_later_q = _rows_of(p_q, stride_qt, p_q_norm, scale, at, n_rows, n_cols, COMPUTE, BLOCK_D, WHOLE_D)
                b_later_q *= b_decay
                b_scores = tl.trans(tl.load(p_scores + at * CHUNK + row + tile))
                b_columns = product(b_scores, b_later_q, b_columns, KIND, PARTS)
                b_later_k = b_later_q
                if of_keys_ptr is not None:
                    b_later_k = _rows_of(p_k, stride_kt, p_k_norm, unit, at, n_rows, n_cols, COMPUTE, BLOCK_D, WHOLE_D)
                    b_later_k *= b_decay
                    b_keys = tl.trans(tl.load(p_keys + at * CHUNK + row + tile))
                    b_columns = product(b_keys, b_later_k, b_columns, KIND, PARTS)
                if parts_ptr is not None:
                    for other in range(block):
                        to = other * 16
                        b_other = _rows_of(
                            p_k, stride_kt, p_k_norm, unit, to, n_rows, n_cols, COMPUTE, BLOCK_D, WHOLE_D
                        )
                        b_other *= before(end, load_sums(p_sums, size, to, n_rows, n_cols, D, 16, BLOCK_D))
                        b_zero = tl.zeros([16, BLOCK_D], COMPUTE)
                        b_scores = tl.load(p_scores + at * CHUNK + to + tile)
                        b_across += tl.sum(product(b_scores, b_other, b_zero, KIND, PARTS) * b_later_q, 0)
                        if of_keys_ptr is not None:
                            b_keys = tl.load(p_keys + at * CHUNK + to + tile)
                            b_across += tl.sum(product(b_keys, b_other, b_zero, KIND, PARTS) * b_later_k, 0)
            b_columns *= before(end, own)
            b_of_k += b_columns
            b_part += b_across[None, :] + _sums_before(b_columns * b_k, KIND, COMPUTE, 16)

        # Within the block.
        p_own = p_scores + row * CHUNK + row
        b_own = tl.load(p_own + rows * CHUNK + rows)[:, None]
        b_of_q += b_own * b_k
        b_of_k += b_own * b_q
        for j in range(16):
            one = load_sum(p_sums, size, row + j, n_rows, n_cols, D, BLOCK_D)
            m_later = rows[:, None] > j
            b_sum = (own.high - one.high[None, :]) + (own.low - one.low[None, :])
            b_decay = tl.where(m_later, tl.exp(tl.where(m_later, b_sum, 0.0)), 0.0)
            b_key = tl.sum(tl.where(rows[:, None] == j, b_k, 0.0), 0)
            b_by_q = tl.load(p_own + rows * CHUNK + j)[:, None] * b_decay
            b_found = b_by_q * b_q
            b_of_q += b_by_q * b_key[None, :]
            if of_keys_ptr is not None:
                b_by_k = tl.load(p_keys + row * CHUNK + row + rows * CHUNK + j)[:, None] * b_decay
                b_found += b_by_k * b_k
                b_of_k += b_by_k * b_key[None, :]
            b_of_k += tl.where(rows[:, None] == j, tl.sum(b_found, 0)[None, :], 0.0)
            if parts_ptr is not None:
                b_spanning = tl.cumsum(b_found * b_key[None, :], 0, reverse=True)
                b_part += tl.where(m_later, b_spanning, 0.0)
        if parts_ptr is not None:
            store_tile(p_parts, D, b_part, left, n_cols, 16, BLOCK_D, WHOLE_D)
        b_dq += b_of_q
        b_dk += b_of_k
    if dq_ptr is not None:
        b_norm = load_tokens(p_q_norm, row, 1, left, COMPUTE, 16, 1.0) * scale
        p_dq = dq_ptr + batch * stride_dqb + kv_head * stride_dqh + (first + row) * stride_dqt + d
        b_dq = round_to(b_dq * b_norm[:, None], dq_ptr.dtype.element_ty)
        store_tile(p_dq, stride_dqt, b_dq, left, n_cols, 16, BLOCK_D, WHOLE_D)
    if dk_ptr is not None:
        b_norm = load_tokens(p_k_norm, row, 1, left, COMPUTE, 16, 1.0)
        p_dk = dk_ptr + batch * stride_dkb + kv_head * stride_dkh + (first + row) * stride_dkt + d
        b_dk = round_to(b_dk * b_norm[:, None], dk_ptr.dtype.element_ty)
        store_tile(p_dk, stride_dkt, b_dk, left, n_cols, 16, BLOCK_D, WHOLE_D)


@triton.jit(do_not_specialize=PLAIN)
def gated_delta_rule_channel_finish_kernel(
    parts_ptr, total_ptr, states_ptr, dstates_ptr, cu_seqlens_ptr, dg_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of g [B, H_v, T, D] of a chunk and a block of columns from the `parts` of `dqk`."""
    n_blocks = tl.cdiv(D, BLOCK_D)
    d = tl.program_id(0) % n_blocks * BLOCK_D
    head = (tl.program_id(0) // n_blocks % n_heads).to(tl.int64)
    i = tl.program_id(0) // n_blocks // n_heads
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    n_rows, n_cols = place.n_rows, D - d
    WHOLE_D: tl.constexpr = D % BLOCK_D == 0
    cols = tl.arange(0, BLOCK_D)
    o = ((place.batch * n_heads + head) * tokens + place.first) * D + d
    o_chunk = (place.batch * n_heads + head) * n_chunks + place.chunk
    b_whole = tl.zeros([BLOCK_D], COMPUTE)
    o_state = o_chunk * (D * DV) + tl.cast(d, tl.int64) * DV
    for v0 in range(0, DV, BLOCK_V):
        b_state = load_tile(states_ptr + o_state + v0, DV, n_cols, DV - v0, BLOCK_D, BLOCK_V, DV % BLOCK_V == 0)
        b_dstate = load_tile(dstates_ptr + o_state + v0, DV, n_cols, DV - v0, BLOCK_D, BLOCK_V, DV % BLOCK_V == 0)
        b_whole += tl.sum(b_state * b_dstate, 1)
    b_whole *= tl.load(total_ptr + o_chunk * D + d + cols, mask=cols < n_cols, other=0.0)
    b_dg = load_tile(parts_ptr + o, D, n_rows, n_cols, CHUNK, BLOCK_D, WHOLE_D) + b_whole[None, :]
    b_x = load_tile(parts_ptr + size * D + o, D, n_rows, n_cols, CHUNK, BLOCK_D, WHOLE_D)
    b_dg += tl.cumsum(b_x, 0, reverse=True)
    b_x = load_tile(parts_ptr + 2 * size * D + o, D, n_rows, n_cols, CHUNK, BLOCK_D, WHOLE_D)
    b_dg += _sums_before(b_x, KIND, COMPUTE, CHUNK)
    b_dg = round_to(b_dg, dg_ptr.dtype.element_ty)
    store_tile(dg_ptr + o, D, b_dg, n_rows, n_cols, CHUNK, BLOCK_D, WHOLE_D)
