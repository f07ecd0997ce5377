"""A decay for each dimension of a key: what the other kernels read for each chunk.

The sums of log decays [B, H_v, T, D] are kept as two numbers, see `chunks.Decay`. Products of the tokens of a chunk are
sums over dimensions with the decay between the two tokens: within a block of 16 tokens they are computed for each pair;
for two blocks, rows of the later one are decayed from its start and keys of the earlier one up to there, and multiplied
by a matmul. The kernels that multiply with states read rows that were decayed before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels.ops.gated_delta_rule.triton.chunks import load_tile, load_tokens, place_of, store_tile
from foundry_kernels.ops.gated_delta_rule.triton.gates import open_beta, softplus
from foundry_kernels.ops.gated_delta_rule.triton.prepare import inverse_of_unit_lower, reciprocal_norm
from foundry_kernels.ops.gated_delta_rule.triton.products import product

#: exp of less is 0, in float64 too; with -inf, differences of sums would be NaN.
_LEAST = tl.constexpr(-1e4)
PLAIN = ("tokens", "n_chunks", "n_documents")


class Sums(NamedTuple):
    """Sums of log decays up to tokens, each of two numbers: [ROWS, COLS], or [COLS] of one token."""

    high: Any
    low: Any


@triton.jit
def load_sums(ptr, size, row, n_rows, n_cols, D: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sums up to tokens row .. row + ROWS - 1 of the chunk at `ptr`; past its end nothing decays."""
    rows = tl.minimum(row + tl.arange(0, ROWS), n_rows - 1)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    o = rows * D + cols
    m = (cols < n_cols) & (rows >= 0)
    return Sums(tl.load(ptr + o, mask=m, other=0.0), tl.load(ptr + size * D + o, mask=m, other=0.0))


@triton.jit
def load_sum(ptr, size, row, n_rows, n_cols, D: tl.constexpr, COLS: tl.constexpr):
    """The sum up to one token."""
    cols = tl.arange(0, COLS)
    o = tl.minimum(row, n_rows - 1) * D + cols
    m = cols < n_cols
    return Sums(tl.load(ptr + o, mask=m, other=0.0), tl.load(ptr + size * D + o, mask=m, other=0.0))


@triton.jit
def after(sums, one):
    """[ROWS, COLS]: the decay from a token to later ones."""
    return tl.exp((sums.high - one.high[None, :]) + (sums.low - one.low[None, :]))


@triton.jit
def before(one, sums):
    """[ROWS, COLS]: the decay from tokens to a later one."""
    return tl.exp((one.high[None, :] - sums.high) + (one.low[None, :] - sums.low))


@triton.jit(do_not_specialize=PLAIN)
def gated_delta_rule_channel_rows_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, decay_log_ptr, dt_bias_ptr, cu_seqlens_ptr,
    sums_ptr, q_norm_ptr, k_norm_ptr, q_start_ptr, k_start_ptr, k_end_ptr, total_ptr, opened_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_gb, stride_gh, stride_gt,
    stride_bb, stride_bh, stride_bt,
    COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    BETA_LIMIT: tl.constexpr,
):  # fmt: skip
    """Writes for a chunk and a head of v the sums of log decays [2, B, H_v, T, D], the reciprocal norms of q and k [B,
    H_k, T], if they have pointers, q and k decayed from the chunk's start, and k decayed to its end, [B, H_v, T, D],
    the decay of the chunk [B, H_v, n_chunks, D], and beta behind its gate [B, H_v, T], if it has a pointer."""
    scale = tl.full([], 0.0, COMPUTE) + scale
    i = tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    n_rows = place.n_rows
    batch, first, kv_head = place.batch, place.first, head // group
    WHOLE: tl.constexpr = D % BLOCK_D == 0
    rows = tl.arange(0, CHUNK)
    p_q = q_ptr + batch * stride_qb + kv_head * stride_qh + first * stride_qt
    p_k = k_ptr + batch * stride_kb + kv_head * stride_kh + first * stride_kt
    p_g = g_ptr + batch * stride_gb + head * stride_gh + first * stride_gt
    b_q_norm = tl.full([CHUNK], 1.0, COMPUTE)
    b_k_norm = b_q_norm
    if k_norm_ptr is not None:
        b_q2 = tl.zeros([CHUNK], COMPUTE)
        b_k2 = tl.zeros([CHUNK], COMPUTE)
        for d in range(0, D, BLOCK_D):
            b_q = load_tile(p_q + d, stride_qt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE).to(COMPUTE)
            b_k = load_tile(p_k + d, stride_kt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE).to(COMPUTE)
            b_q2 += tl.sum(b_q * b_q, 1)
            b_k2 += tl.sum(b_k * b_k, 1)
        b_q_norm = reciprocal_norm(b_q2)
        b_k_norm = reciprocal_norm(b_k2)
        o_norms = (batch * (n_heads // group) + kv_head) * tokens + first + rows
        m_norms = (rows < n_rows) & (head % group == 0)
        tl.store(q_norm_ptr + o_norms, b_q_norm, mask=m_norms)
        tl.store(k_norm_ptr + o_norms, b_k_norm, mask=m_norms)
    if opened_ptr is not None:
        p_beta = beta_ptr + batch * stride_bb + head * stride_bh
        b_beta = open_beta(load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK), BETA_LIMIT)
        tl.store(opened_ptr + (batch * n_heads + head) * tokens + first + rows, b_beta, mask=rows < n_rows)
    o = ((batch * n_heads + head) * tokens + first) * D
    o_total = ((batch * n_heads + head) * n_chunks + place.chunk) * D
    for d in range(0, D, BLOCK_D):
        cols = tl.arange(0, BLOCK_D)
        b_g = load_tile(p_g + d, stride_gt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE)
        if decay_log_ptr is not None:
            b_g = b_g.to(COMPUTE)
            if dt_bias_ptr is not None:
                b_g += tl.load(dt_bias_ptr + head * D + d + cols, mask=cols < D - d, other=0.0).to(COMPUTE)[None, :]
            b_g = -tl.exp(tl.load(decay_log_ptr + head).to(COMPUTE)) * softplus(b_g)
            b_g = tl.where(rows[:, None] < n_rows, b_g, 0.0)
        b_g = b_g.to(tl.float64)
        b_sum = tl.cumsum(tl.where(b_g < _LEAST, _LEAST, b_g), 0)
        b_last = tl.sum(tl.where(rows[:, None] == CHUNK - 1, b_sum, 0.0), 0)
        b_high = b_sum.to(COMPUTE)
        store_tile(sums_ptr + o + d, D, b_high, n_rows, D - d, CHUNK, BLOCK_D, WHOLE)
        b_low = (b_sum - b_high.to(tl.float64)).to(COMPUTE)
        store_tile(sums_ptr + size * D + o + d, D, b_low, n_rows, D - d, CHUNK, BLOCK_D, WHOLE)
        b_start = tl.exp(b_sum.to(COMPUTE))
        b_end = tl.exp((b_last[None, :] - b_sum).to(COMPUTE))
        b_q = load_tile(p_q + d, stride_qt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE).to(COMPUTE)
        b_k = load_tile(p_k + d, stride_kt, n_rows, D - d, CHUNK, BLOCK_D, WHOLE).to(COMPUTE) * b_k_norm[:, None]
        b_q *= (b_q_norm * scale)[:, None] * b_start
        store_tile(q_start_ptr + o + d, D, b_q, n_rows, D - d, CHUNK, BLOCK_D, WHOLE)
        store_tile(k_start_ptr + o + d, D, b_k * b_start, n_rows, D - d, CHUNK, BLOCK_D, WHOLE)
        store_tile(k_end_ptr + o + d, D, b_k * b_end, n_rows, D - d, CHUNK, BLOCK_D, WHOLE)
        tl.store(total_ptr + o_total + d + cols, tl.exp(b_last.to(COMPUTE)), mask=cols < D - d)


@triton.jit(do_not_specialize=PLAIN)
def gated_delta_rule_channel_scores_kernel(
    q_ptr, k_ptr, sums_ptr, q_norm_ptr, k_norm_ptr, cu_seqlens_ptr, scores_ptr, keys_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes for 16 tokens of a chunk and a head of v the products of their queries, times the scale, with the keys up
    to them, and of their keys with the keys before them, if these have a pointer: rows of lower triangles [B, H_v,
    n_chunks, CHUNK, CHUNK], 0 above."""
    scale = tl.full([], 0.0, COMPUTE) + scale
    BLOCKS: tl.constexpr = CHUNK // 16
    block = tl.program_id(0) % BLOCKS
    head = (tl.program_id(0) // BLOCKS % n_heads).to(tl.int64)
    i = tl.program_id(0) // BLOCKS // n_heads
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    n_rows = place.n_rows
    batch, first, kv_head = place.batch, place.first, head // group
    WHOLE: tl.constexpr = D % BLOCK_D == 0
    row = block * 16
    left = n_rows - row
    rows = tl.arange(0, 16)
    cols = tl.arange(0, BLOCK_D)
    p_q = q_ptr + batch * stride_qb + kv_head * stride_qh + first * stride_qt
    p_k = k_ptr + batch * stride_kb + kv_head * stride_kh + first * stride_kt
    p_sums = sums_ptr + ((batch * n_heads + head) * tokens + first) * D
    o_norms = (batch * (n_heads // group) + kv_head) * tokens + first
    p_q_norm = None if q_norm_ptr is None else q_norm_ptr + o_norms
    p_k_norm = None if k_norm_ptr is None else k_norm_ptr + o_norms
    o = ((batch * n_heads + head) * n_chunks + place.chunk) * (CHUNK * CHUNK) + row * CHUNK
    o_square = rows[:, None] * CHUNK + rows[None, :]
    b_q_norm = load_tokens(p_q_norm, row, 1, left, COMPUTE, 16, 1.0) * scale
    b_own_norm = load_tokens(p_k_norm, row, 1, left, COMPUTE, 16, 1.0)
    for other in range(BLOCKS):
        b_scores = tl.zeros([16, 16], COMPUTE)
        b_keys = tl.zeros([16, 16], COMPUTE)
        if other < block:
            for d in range(0, D, BLOCK_D):
                start = load_sum(p_sums + d, size, row - 1, n_rows, D - d, D, BLOCK_D)
                own = load_sums(p_sums + d, size, row, n_rows, D - d, D, 16, BLOCK_D)
                earlier = load_sums(p_sums + d, size, other * 16, n_rows, D - d, D, 16, BLOCK_D)
                p_other = p_k + other * 16 * stride_kt + d
                b_other = load_tile(p_other, stride_kt, n_rows - other * 16, D - d, 16, BLOCK_D, WHOLE).to(COMPUTE)
                b_other = tl.trans(b_other * before(start, earlier))
                b_decay = after(own, start)
                b_q = load_tile(p_q + row * stride_qt + d, stride_qt, left, D - d, 16, BLOCK_D, WHOLE).to(COMPUTE)
                b_scores = product(b_q * b_decay, b_other, b_scores, KIND, PARTS)
                if keys_ptr is not None:
                    b_k = load_tile(p_k + row * stride_kt + d, stride_kt, left, D - d, 16, BLOCK_D, WHOLE).to(COMPUTE)
                    b_keys = product(b_k * b_decay, b_other, b_keys, KIND, 3)
        if other == block:
            for d in range(0, D, BLOCK_D):
                own = load_sums(p_sums + d, size, row, n_rows, D - d, D, 16, BLOCK_D)
                b_q = load_tile(p_q + row * stride_qt + d, stride_qt, left, D - d, 16, BLOCK_D, WHOLE).to(COMPUTE)
                b_k = load_tile(p_k + row * stride_kt + d, stride_kt, left, D - d, 16, BLOCK_D, WHOLE).to(COMPUTE)
                for j in range(16):
                    one = load_sum(p_sums + d, size, row + j, n_rows, D - d, D, BLOCK_D)
                    m_key = (cols < D - d) & (row + j < n_rows)
                    b_key = tl.load(p_k + (row + j) * stride_kt + d + cols, mask=m_key, other=0.0).to(COMPUTE)
                    m_later = rows[:, None] >= j
                    b_sum = (own.high - one.high[None, :]) + (own.low - one.low[None, :])
                    b_decayed = tl.exp(tl.where(m_later, b_sum, 0.0)) * b_key[None, :]
                    m_column = (rows[None, :] == j) & m_later
                    b_scores += tl.where(m_column, tl.sum(b_q * b_decayed, 1)[:, None], 0.0)
                    if keys_ptr is not None:
                        m_column = (rows[None, :] == j) & (rows[:, None] > j)
                        b_keys += tl.where(m_column, tl.sum(b_k * b_decayed, 1)[:, None], 0.0)
        b_norm = load_tokens(p_k_norm, other * 16, 1, n_rows - other * 16, COMPUTE, 16, 1.0)
        tl.store(scores_ptr + o + other * 16 + o_square, b_scores * b_q_norm[:, None] * b_norm[None, :])
        if keys_ptr is not None:
            tl.store(keys_ptr + o + other * 16 + o_square, b_keys * b_own_norm[:, None] * b_norm[None, :])


@triton.jit(do_not_specialize=PLAIN)
def gated_delta_rule_channel_solve_kernel(
    keys_ptr, scores_ptr, beta_ptr, dout_ptr, cu_seqlens_ptr, inverse_ptr, du_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    stride_bb, stride_bh, stride_bt, stride_ob, stride_oh, stride_ot,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, MERGES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes what has a pointer: the inverse of the triangle of a chunk and a head of v, and the gradients of the
    corrected values [B, H_v, T, DV] that the outputs of the same chunk have."""
    i = tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    batch, first, n_rows = place.batch, place.first, place.n_rows
    WHOLE: tl.constexpr = DV % BLOCK_V == 0
    rows = tl.arange(0, CHUNK)
    o = ((batch * n_heads + head) * n_chunks + place.chunk) * (CHUNK * CHUNK)
    square = rows[:, None] * CHUNK + rows[None, :]
    if inverse_ptr is not None:
        p_beta = None if beta_ptr is None else beta_ptr + batch * stride_bb + head * stride_bh
        b_beta = load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK, 1.0)
        b_a = tl.load(keys_ptr + o + square) * b_beta[:, None]
        tl.store(inverse_ptr + o + square, inverse_of_unit_lower(b_a, KIND, CHUNK, MERGES))
    if du_ptr is not None:
        b_scores = tl.trans(tl.load(scores_ptr + o + square))
        p_dout = dout_ptr + batch * stride_ob + head * stride_oh + first * stride_ot
        p_du = du_ptr + ((batch * n_heads + head) * tokens + first) * DV
        for v0 in range(0, DV, BLOCK_V):
            b_dout = load_tile(p_dout + v0, stride_ot, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)
            b_du = product(b_scores, b_dout, tl.zeros([CHUNK, BLOCK_V], COMPUTE), KIND, PARTS)
            store_tile(p_du + v0, DV, b_du, n_rows, DV - v0, CHUNK, BLOCK_V, WHOLE)


@triton.jit(do_not_specialize=PLAIN)
def gated_delta_rule_channel_outputs_kernel(
    q_start_ptr, scores_ptr, states_ptr, updates_ptr, cu_seqlens_ptr, out_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    stride_ob, stride_oh, stride_ot,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """A program computes a chunk's outputs of one head, in a block of columns."""
    n_blocks = tl.cdiv(DV, BLOCK_V)
    v0 = tl.program_id(0) % n_blocks * BLOCK_V
    head = (tl.program_id(0) // n_blocks % n_heads).to(tl.int64)
    i = tl.program_id(0) // n_blocks // n_heads
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    n_rows, n_cols = place.n_rows, DV - v0
    WHOLE: tl.constexpr = DV % BLOCK_V == 0
    rows = tl.arange(0, CHUNK)
    o_tokens = (place.batch * n_heads + head) * tokens + place.first
    o_chunk = (place.batch * n_heads + head) * n_chunks + place.chunk
    b_out = tl.zeros([CHUNK, BLOCK_V], COMPUTE)
    for d in range(0, D, BLOCK_D):
        b_q = load_tile(q_start_ptr + o_tokens * D + d, D, n_rows, D - d, CHUNK, BLOCK_D, D % BLOCK_D == 0)
        p_state = states_ptr + o_chunk * (D * DV) + tl.cast(d, tl.int64) * DV + v0
        b_state = load_tile(p_state, DV, D - d, n_cols, BLOCK_D, BLOCK_V, WHOLE)
        b_out = product(b_q, b_state, b_out, KIND, 2)
    b_scores = tl.load(scores_ptr + o_chunk * (CHUNK * CHUNK) + rows[:, None] * CHUNK + rows[None, :])
    b_u = load_tile(updates_ptr + o_tokens * DV + v0, DV, n_rows, n_cols, CHUNK, BLOCK_V, WHOLE)
    b_out = round_to(product(b_scores, b_u, b_out, KIND, 2), out_ptr.dtype.element_ty)
    p_out = out_ptr + place.batch * stride_ob + head * stride_oh + place.first * stride_ot + v0
    store_tile(p_out, stride_ot, b_out, n_rows, n_cols, CHUNK, BLOCK_V, WHOLE)
