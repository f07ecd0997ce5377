"""What the other kernels read for each chunk: sums of the decays, norms of q and k, and the inverse of the triangle.
For the backward pass, also what the outputs give to the gradients of the corrected values.

Within a chunk, the corrected values u of all tokens solve (I + A) u = r, where r is known from the state at the chunk's
start and A is strictly lower triangular. Its inverse is made of blocks of 16 by substitution, which are then merged by
matmuls.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels.ops.gated_delta_rule.triton.chunks import (
    Decay,
    between,
    load_tile,
    load_tokens,
    place_of,
    store_tile,
)
from foundry_kernels.ops.gated_delta_rule.triton.gates import open_beta, softplus
from foundry_kernels.ops.gated_delta_rule.triton.products import product

#: Added to the sum of squares under the root.
_EPS = tl.constexpr(1e-6)
#: exp of less is 0, in float64 too; with -inf, differences of sums would be NaN.
_LEAST = tl.constexpr(-1e4)


@triton.jit
def reciprocal_norm(squares):
    """What `qk_l2norm` multiplies a row by, from the sum of its squares."""
    x = squares + _EPS
    if x.dtype == tl.float32:  # correctly rounded
        return tl.div_rn(1.0, tl.sqrt_rn(x))
    else:
        return 1.0 / tl.sqrt(x)


@triton.jit
def _inverse_of_blocks(b_a, CHUNK: tl.constexpr):
    """The inverses of the diagonal blocks [16, 16] of I + b_a [CHUNK, CHUNK], in their places."""
    BLOCKS: tl.constexpr = CHUNK // 16
    rows = tl.arange(0, CHUNK)[:, None, None]
    blocks = tl.arange(0, BLOCKS)[None, :, None]
    own = rows // 16 == blocks
    b_blocks = tl.reshape(b_a, [CHUNK, BLOCKS, 16])
    b_l = tl.reshape(tl.sum(tl.where(own, b_blocks, 0.0), 1), [BLOCKS, 16, 16])
    down = tl.arange(0, 16)[None, :, None]
    across = tl.arange(0, 16)[None, None, :]
    b_x = tl.where(down == across, 1.0, tl.zeros_like(b_l))
    for j in range(15):
        # Row j is final: its multiples are subtracted from the rows below.
        b_column = tl.sum(tl.where(across == j, b_l, 0.0), 2)
        b_row = tl.sum(tl.where(down == j, b_x, 0.0), 1)
        b_x -= b_column[:, :, None] * b_row[:, None, :]
    b_x = tl.reshape(b_x, [CHUNK, 16])
    return tl.reshape(tl.where(own, b_x[:, None, :], 0.0), [CHUNK, CHUNK])


@triton.jit
def _merged(b_x, b_a, HALF: tl.constexpr, KIND: tl.constexpr, CHUNK: tl.constexpr):
    """The inverses of the diagonal blocks [2 * HALF, 2 * HALF] of I + b_a, from those of the blocks of half this size.

    If X are the inverses of the halves, and L is the part of b_a between two halves, it is X - X L X.
    """
    rows = tl.arange(0, CHUNK)[:, None]
    cols = tl.arange(0, CHUNK)[None, :]
    between_halves = (rows // (2 * HALF) == cols // (2 * HALF)) & (rows // HALF != cols // HALF)
    b_l = tl.where(between_halves, b_a, 0.0)
    b_xl = product(b_x, b_l, tl.zeros_like(b_a), KIND, 3)
    return b_x - product(b_xl, b_x, tl.zeros_like(b_a), KIND, 3)


@triton.jit
def inverse_of_unit_lower(b_a, KIND: tl.constexpr, CHUNK: tl.constexpr, MERGES: tl.constexpr):
    """(I + b_a)^-1 for a strictly lower triangle [CHUNK, CHUNK], CHUNK = 16 * 2^MERGES."""
    b_x = _inverse_of_blocks(b_a, CHUNK)
    for merge in tl.static_range(MERGES):
        b_x = _merged(b_x, b_a, 16 * 2**merge, KIND, CHUNK)
    return b_x


@triton.jit(do_not_specialize=["tokens", "n_chunks", "n_documents"])
def gated_delta_rule_prepare_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, decay_log_ptr, dt_bias_ptr, dout_ptr, cu_seqlens_ptr,
    decay_ptr, q_norm_ptr, k_norm_ptr, inverse_ptr, du_ptr, opened_ptr,
    n_documents, tokens, n_chunks, n_heads, group, decay_size, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_gb, stride_gh, stride_gt,
    stride_bb, stride_bh, stride_bt, stride_ob, stride_oh, stride_ot,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr,
    MERGES: tl.constexpr, PARTS: tl.constexpr, BETA_LIMIT: tl.constexpr,
):  # fmt: skip
    """Writes, of a chunk and a head of v, what has a pointer: the sums of log decays [2, B, H_v, T] (see `Decay`), the
    reciprocal norms of q and k [B, H_k, T], the inverse of the triangle [B, H_v, n_chunks, CHUNK, CHUNK], and the
    gradients of the corrected values [B, H_v, T, DV] that the outputs of the same chunk have, and beta behind its gate
    [B, H_v, T]."""
    scale = tl.full([], 0.0, COMPUTE) + scale
    i = tl.program_id(0) // n_heads
    head = tl.program_id(0) % n_heads
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    n_rows = place.n_rows
    batch, first, v_head = place.batch, place.first, head.to(tl.int64)
    kv_head = v_head // group
    rows = tl.arange(0, CHUNK)
    m_rows = rows < n_rows
    o_tokens = (batch * n_heads + v_head) * tokens + first
    b_high = tl.zeros([CHUNK], COMPUTE)
    b_low = tl.zeros([CHUNK], COMPUTE)
    if decay_ptr is not None:
        p_g = g_ptr + batch * stride_gb + v_head * stride_gh
        if decay_log_ptr is None:
            b_g = load_tokens(p_g, first, stride_gt, n_rows, tl.float64, CHUNK)
        else:
            b_g = load_tokens(p_g, first, stride_gt, n_rows, COMPUTE, CHUNK)
            if dt_bias_ptr is not None:
                b_g += tl.load(dt_bias_ptr + v_head).to(COMPUTE)
            b_g = -tl.exp(tl.load(decay_log_ptr + v_head).to(COMPUTE)) * softplus(b_g)
            b_g = tl.where(m_rows, b_g, 0.0).to(tl.float64)
        b_sum = tl.cumsum(tl.where(b_g < _LEAST, _LEAST, b_g), 0)
        b_high = b_sum.to(COMPUTE)
        b_low = (b_sum - b_high.to(tl.float64)).to(COMPUTE)
        tl.store(decay_ptr + o_tokens + rows, b_high, mask=m_rows)
        tl.store(decay_ptr + decay_size + o_tokens + rows, b_low, mask=m_rows)

    p_q = q_ptr + batch * stride_qb + kv_head * stride_qh + first * stride_qt
    p_k = k_ptr + batch * stride_kb + kv_head * stride_kh + first * stride_kt
    owns_norms = head % group == 0
    b_kk = tl.zeros([CHUNK, CHUNK], COMPUTE)
    b_kq = tl.zeros([CHUNK, CHUNK], COMPUTE)
    b_q2 = tl.zeros([CHUNK], COMPUTE)
    b_k2 = tl.zeros([CHUNK], COMPUTE)
    for d in range(0, D, BLOCK_D):
        b_k = load_tile(p_k + d, stride_kt, n_rows, D - d, CHUNK, BLOCK_D, D % BLOCK_D == 0)
        if inverse_ptr is not None:
            b_kk = product(b_k, tl.trans(b_k), b_kk, KIND, 3)
        if k_norm_ptr is not None:
            b_wide = b_k.to(COMPUTE)
            b_k2 += tl.sum(b_wide * b_wide, 1)
        if k_norm_ptr is not None or du_ptr is not None:
            q_rows = n_rows if du_ptr is not None else n_rows * owns_norms
            b_q = load_tile(p_q + d, stride_qt, q_rows, D - d, CHUNK, BLOCK_D, D % BLOCK_D == 0)
            b_wide = b_q.to(COMPUTE)
            b_q2 += tl.sum(b_wide * b_wide, 1)
            if du_ptr is not None:
                b_kq = product(b_k, tl.trans(b_q), b_kq, KIND, PARTS)
    b_norm = tl.full([CHUNK], 1.0, COMPUTE)
    b_q_norm = b_norm
    if k_norm_ptr is not None:
        o_norms = (batch * (n_heads // group) + kv_head) * tokens + first + rows
        b_norm = reciprocal_norm(b_k2)
        b_q_norm = reciprocal_norm(b_q2)
        tl.store(k_norm_ptr + o_norms, b_norm, mask=m_rows & owns_norms)
        tl.store(q_norm_ptr + o_norms, b_q_norm, mask=m_rows & owns_norms)
    # Past the end, rows of q and k are 0. The two last numbers are not used.
    decay = Decay(b_high, b_low, 0, 0)
    if du_ptr is not None:
        b_p = b_kq * (b_q_norm * scale)[None, :] * b_norm[:, None] * tl.trans(between(decay, False, CHUNK))
        p_dout = dout_ptr + batch * stride_ob + v_head * stride_oh + first * stride_ot
        for v0 in range(0, DV, BLOCK_V):
            b_dout = load_tile(p_dout + v0, stride_ot, n_rows, DV - v0, CHUNK, BLOCK_V, DV % BLOCK_V == 0)
            b_du = product(b_p, b_dout, tl.zeros([CHUNK, BLOCK_V], COMPUTE), KIND, PARTS)
            store_tile(du_ptr + o_tokens * DV + v0, DV, b_du, n_rows, DV - v0, CHUNK, BLOCK_V, DV % BLOCK_V == 0)
    if opened_ptr is not None:
        p_beta = beta_ptr + batch * stride_bb + v_head * stride_bh
        b_beta = open_beta(load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK), BETA_LIMIT)
        tl.store(opened_ptr + o_tokens + rows, b_beta, mask=m_rows)
    if inverse_ptr is not None:
        p_beta = None if beta_ptr is None else beta_ptr + batch * stride_bb + v_head * stride_bh
        b_beta = load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK, 1.0)
        if opened_ptr is not None:
            b_beta = open_beta(b_beta, BETA_LIMIT)
        b_a = b_kk * (b_beta * b_norm)[:, None] * b_norm[None, :]
        if decay_ptr is not None:
            b_a *= between(decay, True, CHUNK)
        b_a = tl.where(rows[:, None] > rows[None, :], b_a, 0.0)
        b_x = inverse_of_unit_lower(b_a, KIND, CHUNK, MERGES)
        o_inverse = ((batch * n_heads + v_head) * n_chunks + place.chunk) * (CHUNK * CHUNK)
        o_square = rows[:, None] * CHUNK + rows[None, :]
        tl.store(inverse_ptr + o_inverse + o_square, b_x)
