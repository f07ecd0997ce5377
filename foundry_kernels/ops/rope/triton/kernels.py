"""The kernels: rotary embedding, with or without norms before it, and the gradient through the norms.

One launch computes q and k. A program takes `BLOCK_TOKENS` tokens of one sequence, loads their angles once and loops
over chunks of `BLOCK_HEADS` heads of q, then of k; `splits` programs share the chunks. The gradient of a rotation is
the inverse rotation, computed by the same kernel. The gradient through the norms has a persistent grid: each program
sums its part of the weights' gradients in float32, and one more kernel sums over the programs. There are no atomics, so
gradients are bitwise deterministic on one device.

The D values of a head are kept as pairs (a, b), two blocks of `BLOCK` >= D/2, so that both pairings use the same code
for norms and rotation. If D > R, the values after the first R form pairs too, but are not rotated.

Names: x is q or k, y its result; stride_xb, stride_xh and stride_xt are x's strides over batch, heads and tokens (qo is
q_out, dqo its gradient); b_ is a block of values, m_ a mask, o_ offsets, p_ pointers; N = BLOCK_TOKENS * BLOCK_HEADS is
the number of rows, and a row is one head of one token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import normalized, reciprocal_rms, round_to


@triton.jit
def _columns(D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Columns [1, BLOCK] of a and b in a row of pairs (i, i + HALF); those from 2 * HALF on are split in the middle."""
    pair = tl.arange(0, BLOCK)[None, :]
    if 2 * HALF == D:
        return pair, pair + HALF
    REST: tl.constexpr = (D - 2 * HALF + 1) // 2
    # Both parts start at multiples of this. It determines the width of accesses, and the compiler cannot infer it.
    VECTOR: tl.constexpr = (HALF | REST) & -(HALF | REST)
    o_a = tl.where(pair < HALF, pair, pair + HALF)
    o_b = tl.where(pair < HALF, pair + HALF, pair + HALF + REST)
    o_a = tl.max_contiguous(tl.multiple_of(o_a, [1, VECTOR]), [1, VECTOR])
    o_b = tl.max_contiguous(tl.multiple_of(o_b, [1, VECTOR]), [1, VECTOR])
    return o_a, o_b


@triton.jit
def _load_pairs(ptr, o_rows, m_rows, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
                BLOCK: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """a and b [N, BLOCK] of the rows at ptr + o_rows [N]; zero where masked or past the row."""
    if INTERLEAVED:  # loads whole rows, so that accesses are wide, and separates pairs in registers
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        b_x = tl.load(ptr + o_rows[:, None] + cols, mask=m_rows[:, None] & (cols < D), other=0.0).to(COMPUTE)
        return tl.split(tl.reshape(b_x, [b_x.shape[0], BLOCK, 2]))
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        o_a, o_b = _columns(D, HALF, BLOCK)
        b_a = tl.load(ptr + o_rows[:, None] + o_a, mask=m_rows[:, None] & (pair < (D + 1) // 2), other=0.0)
        b_b = tl.load(ptr + o_rows[:, None] + o_b, mask=m_rows[:, None] & (pair < D // 2), other=0.0)
        return b_a.to(COMPUTE), b_b.to(COMPUTE)


@triton.jit
def _store_pairs(ptr, o_rows, m_rows, b_a, b_b, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
                 BLOCK: tl.constexpr):  # fmt: skip
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK)[None, :]
        b_x = tl.reshape(tl.join(b_a, b_b), [b_a.shape[0], 2 * BLOCK])
        mask = m_rows[:, None] & (cols < D)
        tl.store(ptr + o_rows[:, None] + cols, round_to(b_x, ptr.dtype.element_ty), mask=mask)
    else:
        pair = tl.arange(0, BLOCK)[None, :]
        o_a, o_b = _columns(D, HALF, BLOCK)
        m_a, m_b = m_rows[:, None] & (pair < (D + 1) // 2), m_rows[:, None] & (pair < D // 2)
        tl.store(ptr + o_rows[:, None] + o_a, round_to(b_a, ptr.dtype.element_ty), mask=m_a)
        tl.store(ptr + o_rows[:, None] + o_b, round_to(b_b, ptr.dtype.element_ty), mask=m_b)


@triton.jit
def _load_weight(ptr, offset, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
                 COMPUTE: tl.constexpr):  # fmt: skip
    """weight + offset as pairs [1, BLOCK]."""
    row = tl.arange(0, 1)
    b_a, b_b = _load_pairs(ptr, row, row == 0, D, HALF, INTERLEAVED, BLOCK, COMPUTE)
    return b_a + offset, b_b + offset


@triton.jit
def _rotate(b_a, b_b, b_cos, b_sin, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    b_ya = b_a * b_cos - b_b * b_sin
    b_yb = b_b * b_cos + b_a * b_sin
    if 2 * HALF != D:
        m_rotated = tl.arange(0, BLOCK)[None, :] < HALF
        b_ya = tl.where(m_rotated, b_ya, b_a)
        b_yb = tl.where(m_rotated, b_yb, b_b)
    return b_ya, b_yb


@triton.jit
def _tile_rows(tile, n_tokens, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """Returns for tile number `tile` its batch, the tokens [N] of its rows, and their heads [N] within a chunk."""
    tiles = tl.cdiv(n_tokens, BLOCK_TOKENS)
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    tokens = (tile % tiles) * BLOCK_TOKENS + row // BLOCK_HEADS
    return (tile // tiles).to(tl.int64), tokens.to(tl.int64), (row % BLOCK_HEADS).to(tl.int64)


@triton.jit
def _load_angles(
    cos_ptr, sin_ptr, pos_ptr, batch, tokens, n_tokens, n_positions,
    stride_cos_b, stride_cos_p, stride_sin_b, stride_sin_p, stride_pos_b, stride_pos_t,
    HALF: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """cos and sin [N, BLOCK] of the tokens. For a position outside of the table, nothing is read and cos is NaN."""
    rows = tokens
    m_rows = tokens < n_tokens
    if pos_ptr is not None:
        rows = tl.load(pos_ptr + batch * stride_pos_b + tokens * stride_pos_t, mask=m_rows, other=0).to(tl.int64)
        m_known = (rows >= 0) & (rows < n_positions)
        m_rows = m_rows & m_known
    pair = tl.arange(0, BLOCK)[None, :]
    mask = m_rows[:, None] & (pair < HALF)
    p_cos = cos_ptr + (batch * stride_cos_b + rows * stride_cos_p)[:, None] + pair
    b_cos = tl.load(p_cos, mask=mask, other=0.0).to(COMPUTE)
    p_sin = sin_ptr + (batch * stride_sin_b + rows * stride_sin_p)[:, None] + pair
    b_sin = tl.load(p_sin, mask=mask, other=0.0).to(COMPUTE)
    if pos_ptr is not None:
        b_cos = tl.where(m_known[:, None], b_cos, float("nan"))
    return b_cos, b_sin


@triton.jit
def _rotate_heads(
    x_ptr, w_ptr, y_ptr, rstd_ptr, b_cos, b_sin, batch, tokens, heads, first, step, n_tokens, n_heads,
    stride_xb, stride_xh, stride_xt, stride_yb, stride_yh, stride_yt, eps, offset,
    NORM: tl.constexpr, ROUND_FIRST: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Normalises and rotates x's chunks `first`, `first + step`, ... into y."""
    if w_ptr is not None:
        b_wa, b_wb = _load_weight(w_ptr, offset, D, HALF, INTERLEAVED, BLOCK, COMPUTE)
    for chunk in range(first, tl.cdiv(n_heads, BLOCK_HEADS), step):
        head = chunk * BLOCK_HEADS + heads
        mask = (head < n_heads) & (tokens < n_tokens)
        o_x = batch * stride_xb + head * stride_xh + tokens * stride_xt
        b_a, b_b = _load_pairs(x_ptr, o_x, mask, D, HALF, INTERLEAVED, BLOCK, COMPUTE)
        if NORM:
            rstd = reciprocal_rms(tl.sum(b_a * b_a + b_b * b_b, 1), D, eps)
            if rstd_ptr is not None:
                tl.store(rstd_ptr + (batch * n_heads + head) * n_tokens + tokens, rstd, mask=mask)
            b_a = normalized(b_a, rstd[:, None], x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
            b_b = normalized(b_b, rstd[:, None], x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
            if w_ptr is not None:
                b_a *= b_wa
                b_b *= b_wb
        b_a, b_b = _rotate(b_a, b_b, b_cos, b_sin, D, HALF, BLOCK)
        o_y = batch * stride_yb + head * stride_yh + tokens * stride_yt
        _store_pairs(y_ptr, o_y, mask, b_a, b_b, D, HALF, INTERLEAVED, BLOCK)


# The compiler does not specialise on these, because they do not affect alignment.
_COUNTS = ["n_tokens", "n_heads", "n_kv_heads", "n_positions", "stride_pos_b", "stride_pos_t"]


@triton.jit(do_not_specialize=[*_COUNTS, "splits"])
def rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, q_out_ptr, k_out_ptr, q_rstd_ptr, k_rstd_ptr, cos_ptr, sin_ptr, pos_ptr,
    n_tokens, n_heads, n_kv_heads, n_positions, splits,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_qob, stride_qoh, stride_qot, stride_kob, stride_koh, stride_kot,
    stride_cos_b, stride_cos_p, stride_sin_b, stride_sin_p, stride_pos_b, stride_pos_t, direction, eps, offset,
    NORM: tl.constexpr, ROUND_FIRST: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rotates q and k, normalised first if NORM, by their angles (direction 1.0) or back (-1.0). q_ptr or k_ptr may be
    None."""
    program = tl.program_id(0)
    batch, tokens, heads = _tile_rows(program // splits, n_tokens, BLOCK_TOKENS, BLOCK_HEADS)
    b_cos, b_sin = _load_angles(
        cos_ptr, sin_ptr, pos_ptr, batch, tokens, n_tokens, n_positions,
        stride_cos_b, stride_cos_p, stride_sin_b, stride_sin_p, stride_pos_b, stride_pos_t, HALF, BLOCK, COMPUTE,
    )  # fmt: skip
    b_sin *= direction
    # The tile's programs take chunks in turns, first those of q, then those of k.
    first_q = program % splits
    first_k = (first_q + splits - tl.cdiv(n_heads, BLOCK_HEADS) % splits) % splits
    if q_ptr is not None:
        _rotate_heads(
            q_ptr, q_weight_ptr, q_out_ptr, q_rstd_ptr, b_cos, b_sin, batch, tokens, heads, first_q, splits,
            n_tokens, n_heads, stride_qb, stride_qh, stride_qt, stride_qob, stride_qoh, stride_qot, eps, offset,
            NORM, ROUND_FIRST, D, HALF, INTERLEAVED, BLOCK_HEADS, BLOCK, COMPUTE,
        )  # fmt: skip
    if k_ptr is not None:
        _rotate_heads(
            k_ptr, k_weight_ptr, k_out_ptr, k_rstd_ptr, b_cos, b_sin, batch, tokens, heads, first_k, splits,
            n_tokens, n_kv_heads, stride_kb, stride_kh, stride_kt, stride_kob, stride_koh, stride_kot, eps, offset,
            NORM, ROUND_FIRST, D, HALF, INTERLEAVED, BLOCK_HEADS, BLOCK, COMPUTE,
        )  # fmt: skip


@triton.jit
def _normed_gradient(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, cos_ptr, sin_ptr, pos_ptr, dx_ptr, dw_ptr,
    n_tokens, n_heads, n_positions, n_items, splits,
    stride_dyb, stride_dyh, stride_dyt, stride_xb, stride_xh, stride_xt, stride_dxb, stride_dxh, stride_dxt,
    stride_cos_b, stride_cos_p, stride_sin_b, stride_sin_p, stride_pos_b, stride_pos_t, offset,
    ROUND_FIRST: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program's part of x's items: dx, and its row of dw_ptr [programs, D]. Either pointer may be None."""
    b_dwa = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK], COMPUTE)
    b_dwb = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK], COMPUTE)
    if w_ptr is not None:
        b_wa, b_wb = _load_weight(w_ptr, offset, D, HALF, INTERLEAVED, BLOCK, COMPUTE)
    program = tl.program_id(0)
    for item in range(program, n_items, tl.num_programs(0)):
        batch, tokens, heads = _tile_rows(item // splits, n_tokens, BLOCK_TOKENS, BLOCK_HEADS)
        b_cos, b_sin = _load_angles(
            cos_ptr, sin_ptr, pos_ptr, batch, tokens, n_tokens, n_positions,
            stride_cos_b, stride_cos_p, stride_sin_b, stride_sin_p, stride_pos_b, stride_pos_t, HALF, BLOCK, COMPUTE,
        )  # fmt: skip
        for chunk in range(item % splits, tl.cdiv(n_heads, BLOCK_HEADS), splits):
            head = chunk * BLOCK_HEADS + heads
            mask = (head < n_heads) & (tokens < n_tokens)
            o_dy = batch * stride_dyb + head * stride_dyh + tokens * stride_dyt
            o_x = batch * stride_xb + head * stride_xh + tokens * stride_xt
            b_va, b_vb = _load_pairs(dy_ptr, o_dy, mask, D, HALF, INTERLEAVED, BLOCK, COMPUTE)
            b_a, b_b = _load_pairs(x_ptr, o_x, mask, D, HALF, INTERLEAVED, BLOCK, COMPUTE)
            o_rstd = (batch * n_heads + head) * n_tokens + tokens
            rstd = tl.load(rstd_ptr + o_rstd, mask=mask, other=0.0)[:, None]
            b_va, b_vb = _rotate(b_va, b_vb, b_cos, -b_sin, D, HALF, BLOCK)
            if dw_ptr is not None:
                b_dwa += b_va * normalized(b_a, rstd, x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
                b_dwb += b_vb * normalized(b_b, rstd, x_ptr.dtype.element_ty, ROUND_FIRST, COMPUTE)
            if dx_ptr is not None:
                if w_ptr is not None:
                    b_va *= b_wa
                    b_vb *= b_wb
                b_a *= rstd
                b_b *= rstd
                mean = tl.sum(b_va * b_a + b_vb * b_b, 1)[:, None] / D
                o_dx = batch * stride_dxb + head * stride_dxh + tokens * stride_dxt
                _store_pairs(dx_ptr, o_dx, mask, rstd * (b_va - b_a * mean), rstd * (b_vb - b_b * mean),
                             D, HALF, INTERLEAVED, BLOCK)  # fmt: skip
    if dw_ptr is not None:
        row = tl.arange(0, 1)
        _store_pairs(dw_ptr + program.to(tl.int64) * D, row, row == 0, tl.sum(b_dwa, 0)[None, :],
                     tl.sum(b_dwb, 0)[None, :], D, HALF, INTERLEAVED, BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=[*_COUNTS, "q_items", "k_items", "q_splits", "k_splits"])
def qk_norm_rope_bwd_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, q_rstd_ptr, k_rstd_ptr, cos_ptr, sin_ptr, pos_ptr,
    dq_ptr, dk_ptr, dq_weight_ptr, dk_weight_ptr,
    n_tokens, n_heads, n_kv_heads, n_positions, q_items, k_items, q_splits, k_splits,
    stride_dqob, stride_dqoh, stride_dqot, stride_dkob, stride_dkoh, stride_dkot,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt,
    stride_dqb, stride_dqh, stride_dqt, stride_dkb, stride_dkh, stride_dkt,
    stride_cos_b, stride_cos_p, stride_sin_b, stride_sin_p, stride_pos_b, stride_pos_t, offset,
    ROUND_FIRST: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p takes items p, p + programs, ... of q, then of k. Summing both weights' gradients at once would take
    the registers of a second resident program. Only results with a pointer are computed."""
    if q_ptr is not None:
        _normed_gradient(
            dq_out_ptr, q_ptr, q_weight_ptr, q_rstd_ptr, cos_ptr, sin_ptr, pos_ptr, dq_ptr, dq_weight_ptr,
            n_tokens, n_heads, n_positions, q_items, q_splits, stride_dqob, stride_dqoh, stride_dqot,
            stride_qb, stride_qh, stride_qt, stride_dqb, stride_dqh, stride_dqt,
            stride_cos_b, stride_cos_p, stride_sin_b, stride_sin_p, stride_pos_b, stride_pos_t, offset,
            ROUND_FIRST, D, HALF, INTERLEAVED, COMPUTE, BLOCK_TOKENS, BLOCK_HEADS, BLOCK,
        )  # fmt: skip
    if k_ptr is not None:
        _normed_gradient(
            dk_out_ptr, k_ptr, k_weight_ptr, k_rstd_ptr, cos_ptr, sin_ptr, pos_ptr, dk_ptr, dk_weight_ptr,
            n_tokens, n_kv_heads, n_positions, k_items, k_splits, stride_dkob, stride_dkoh, stride_dkot,
            stride_kb, stride_kh, stride_kt, stride_dkb, stride_dkh, stride_dkt,
            stride_cos_b, stride_cos_p, stride_sin_b, stride_sin_p, stride_pos_b, stride_pos_t, offset,
            ROUND_FIRST, D, HALF, INTERLEAVED, COMPUTE, BLOCK_TOKENS, BLOCK_HEADS, BLOCK,
        )  # fmt: skip
