"""The kernels: rotary embedding with and without norms in front of it, and the gradient through the norms.

One launch serves q and k. A program takes `BLOCK_TOKENS` tokens of one sequence, loads their angles once and walks
over chunks of `BLOCK_HEADS` heads of q, then of k; the walk is shared out among `splits` programs. The gradient of a
rotation is the rotation back, by the same kernel. The gradient through the norms has a persistent grid: each program
keeps its share of the weights' gradients in float32, and one more kernel sums them. No atomics, so a gradient is the
same bits in every run on one device.

A head is held as pairs (a, b): a row's D values are two blocks of `BLOCK` >= D/2, so norms and rotation read alike for
both pairings. Where D > R, the values behind the first R make up pairs of their own, which are not turned.

Names: x is q or k, y its result; *s0, *s1, *s2 are strides over batch, heads and tokens; b_ is a block of values,
m_ a mask, o_ offsets; N = BLOCK_TOKENS * BLOCK_HEADS rows, a row being one head of one token.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton import normalized, reciprocal_rms, round_to


@triton.jit
def _columns(D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Columns [1, BLOCK] of a and b in a row of pairs (i, i + HALF); those behind 2 * HALF are split in the middle."""
    pair = tl.arange(0, BLOCK)[None, :]
    if 2 * HALF == D:
        return pair, pair + HALF
    REST: tl.constexpr = (D - 2 * HALF + 1) // 2
    # Both parts start at multiples of this, which the compiler cannot see: it decides how wide the accesses are.
    VECTOR: tl.constexpr = (HALF | REST) & -(HALF | REST)
    o_a = tl.where(pair < HALF, pair, pair + HALF)
    o_b = tl.where(pair < HALF, pair + HALF, pair + HALF + REST)
    o_a = tl.max_contiguous(tl.multiple_of(o_a, [1, VECTOR]), [1, VECTOR])
    o_b = tl.max_contiguous(tl.multiple_of(o_b, [1, VECTOR]), [1, VECTOR])
    return o_a, o_b


@triton.jit
def _load_pairs(ptr, o_rows, m_rows, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
                BLOCK: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """a and b [N, BLOCK] of the rows at ptr + o_rows [N]; zero where there is nothing."""
    if INTERLEAVED:  # whole rows, so that accesses are wide; neighbours part in registers
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
        turns = tl.arange(0, BLOCK)[None, :] < HALF
        b_ya = tl.where(turns, b_ya, b_a)
        b_yb = tl.where(turns, b_yb, b_b)
    return b_ya, b_yb


@triton.jit
def _tile(tile, n_tokens, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr):
    """The batch of tile number `tile`, the tokens [N] of its rows, and their heads [N] within a chunk."""
    tiles = tl.cdiv(n_tokens, BLOCK_TOKENS)
    row = tl.arange(0, BLOCK_TOKENS * BLOCK_HEADS)
    tokens = (tile % tiles) * BLOCK_TOKENS + row // BLOCK_HEADS
    return (tile // tiles).to(tl.int64), tokens.to(tl.int64), (row % BLOCK_HEADS).to(tl.int64)


@triton.jit
def _angles(cos_ptr, sin_ptr, pos_ptr, batch, tokens, n_tokens, n_positions, cs0, cs1, ss0, ss1, ps0, ps1,
            HALF: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr):  # fmt: skip
    """cos and sin [N, BLOCK] of the tokens. A position outside of the table is not read: its cos is NaN."""
    rows = tokens
    m_rows = tokens < n_tokens
    if pos_ptr is not None:
        rows = tl.load(pos_ptr + batch * ps0 + tokens * ps1, mask=m_rows, other=0).to(tl.int64)
        m_known = (rows >= 0) & (rows < n_positions)
        m_rows = m_rows & m_known
    pair = tl.arange(0, BLOCK)[None, :]
    mask = m_rows[:, None] & (pair < HALF)
    b_cos = tl.load(cos_ptr + (batch * cs0 + rows * cs1)[:, None] + pair, mask=mask, other=0.0).to(COMPUTE)
    b_sin = tl.load(sin_ptr + (batch * ss0 + rows * ss1)[:, None] + pair, mask=mask, other=0.0).to(COMPUTE)
    if pos_ptr is not None:
        b_cos = tl.where(m_known[:, None], b_cos, float("nan"))
    return b_cos, b_sin


@triton.jit
def _turn_heads(
    x_ptr, w_ptr, y_ptr, rstd_ptr, b_cos, b_sin, batch, tokens, heads, first, step, n_tokens, n_heads,
    xs0, xs1, xs2, ys0, ys1, ys2, eps, offset,
    NORM: tl.constexpr, ROUND_FIRST: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """y of x's chunks `first`, `first + step`, ..."""
    if w_ptr is not None:
        b_wa, b_wb = _load_weight(w_ptr, offset, D, HALF, INTERLEAVED, BLOCK, COMPUTE)
    for chunk in range(first, tl.cdiv(n_heads, BLOCK_HEADS), step):
        head = chunk * BLOCK_HEADS + heads
        mask = (head < n_heads) & (tokens < n_tokens)
        o_x = batch * xs0 + head * xs1 + tokens * xs2
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
        o_y = batch * ys0 + head * ys1 + tokens * ys2
        _store_pairs(y_ptr, o_y, mask, b_a, b_b, D, HALF, INTERLEAVED, BLOCK)


# Numbers that no access is aligned by: a launch with other ones needs no other code.
_COUNTS = ["n_tokens", "n_q", "n_k", "n_positions", "ps0", "ps1"]


@triton.jit(do_not_specialize=[*_COUNTS, "splits"])
def rope_kernel(
    q_ptr, k_ptr, qw_ptr, kw_ptr, yq_ptr, yk_ptr, q_rstd_ptr, k_rstd_ptr, cos_ptr, sin_ptr, pos_ptr,
    n_tokens, n_q, n_k, n_positions, splits, qs0, qs1, qs2, ks0, ks1, ks2, yqs0, yqs1, yqs2, yks0, yks1, yks2,
    cs0, cs1, ss0, ss1, ps0, ps1, direction, eps, offset,
    NORM: tl.constexpr, ROUND_FIRST: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """q and k, normalised first if NORM, turned by their angles (direction 1.0) or back (-1.0). Without q_ptr there is
    no q."""
    program = tl.program_id(0)
    batch, tokens, heads = _tile(program // splits, n_tokens, BLOCK_TOKENS, BLOCK_HEADS)
    b_cos, b_sin = _angles(cos_ptr, sin_ptr, pos_ptr, batch, tokens, n_tokens, n_positions, cs0, cs1, ss0, ss1,
                           ps0, ps1, HALF, BLOCK, COMPUTE)  # fmt: skip
    b_sin *= direction
    # The programs of a tile take turns over the chunks of q and go on with those of k.
    first_q = program % splits
    first_k = (first_q + splits - tl.cdiv(n_q, BLOCK_HEADS) % splits) % splits
    if q_ptr is not None:
        _turn_heads(q_ptr, qw_ptr, yq_ptr, q_rstd_ptr, b_cos, b_sin, batch, tokens, heads, first_q, splits, n_tokens,
                    n_q, qs0, qs1, qs2, yqs0, yqs1, yqs2, eps, offset,
                    NORM, ROUND_FIRST, D, HALF, INTERLEAVED, BLOCK_HEADS, BLOCK, COMPUTE)  # fmt: skip
    if k_ptr is not None:
        _turn_heads(k_ptr, kw_ptr, yk_ptr, k_rstd_ptr, b_cos, b_sin, batch, tokens, heads, first_k, splits, n_tokens,
                    n_k, ks0, ks1, ks2, yks0, yks1, yks2, eps, offset,
                    NORM, ROUND_FIRST, D, HALF, INTERLEAVED, BLOCK_HEADS, BLOCK, COMPUTE)  # fmt: skip


@triton.jit
def _gradient(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, cos_ptr, sin_ptr, pos_ptr, dx_ptr, dw_ptr,
    n_tokens, n_heads, n_positions, n_items, splits, gs0, gs1, gs2, xs0, xs1, xs2, ds0, ds1, ds2,
    cs0, cs1, ss0, ss1, ps0, ps1, offset,
    ROUND_FIRST: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx where it has a pointer, and this program's row of dw_ptr [programs, D], from its share of x's items."""
    b_dwa = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK], COMPUTE)
    b_dwb = tl.zeros([BLOCK_TOKENS * BLOCK_HEADS, BLOCK], COMPUTE)
    if w_ptr is not None:
        b_wa, b_wb = _load_weight(w_ptr, offset, D, HALF, INTERLEAVED, BLOCK, COMPUTE)
    program = tl.program_id(0)
    for item in range(program, n_items, tl.num_programs(0)):
        batch, tokens, heads = _tile(item // splits, n_tokens, BLOCK_TOKENS, BLOCK_HEADS)
        b_cos, b_sin = _angles(cos_ptr, sin_ptr, pos_ptr, batch, tokens, n_tokens, n_positions, cs0, cs1, ss0, ss1,
                               ps0, ps1, HALF, BLOCK, COMPUTE)  # fmt: skip
        for chunk in range(item % splits, tl.cdiv(n_heads, BLOCK_HEADS), splits):
            head = chunk * BLOCK_HEADS + heads
            mask = (head < n_heads) & (tokens < n_tokens)
            o_dy = batch * gs0 + head * gs1 + tokens * gs2
            o_x = batch * xs0 + head * xs1 + tokens * xs2
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
                o_dx = batch * ds0 + head * ds1 + tokens * ds2
                _store_pairs(dx_ptr, o_dx, mask, rstd * (b_va - b_a * mean), rstd * (b_vb - b_b * mean),
                             D, HALF, INTERLEAVED, BLOCK)  # fmt: skip
    if dw_ptr is not None:
        row = tl.arange(0, 1)
        _store_pairs(dw_ptr + program.to(tl.int64) * D, row, row == 0, tl.sum(b_dwa, 0)[None, :],
                     tl.sum(b_dwb, 0)[None, :], D, HALF, INTERLEAVED, BLOCK)  # fmt: skip


@triton.jit(do_not_specialize=[*_COUNTS, "q_items", "k_items", "q_splits", "k_splits"])
def qk_norm_rope_bwd_kernel(
    dyq_ptr, dyk_ptr, q_ptr, k_ptr, qw_ptr, kw_ptr, q_rstd_ptr, k_rstd_ptr, cos_ptr, sin_ptr, pos_ptr,
    dq_ptr, dk_ptr, dqw_ptr, dkw_ptr, n_tokens, n_q, n_k, n_positions, q_items, k_items, q_splits, k_splits,
    gqs0, gqs1, gqs2, gks0, gks1, gks2, qs0, qs1, qs2, ks0, ks1, ks2, dqs0, dqs1, dqs2, dks0, dks1, dks2,
    cs0, cs1, ss0, ss1, ps0, ps1, offset,
    ROUND_FIRST: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, COMPUTE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program p takes items p, p + programs, ... of q, then of k: one after the other, since the sums of both weights'
    gradients would cost the registers of a second program beside it. What has no pointer is not computed."""
    if q_ptr is not None:
        _gradient(dyq_ptr, q_ptr, qw_ptr, q_rstd_ptr, cos_ptr, sin_ptr, pos_ptr, dq_ptr, dqw_ptr,
                  n_tokens, n_q, n_positions, q_items, q_splits, gqs0, gqs1, gqs2, qs0, qs1, qs2, dqs0, dqs1, dqs2,
                  cs0, cs1, ss0, ss1, ps0, ps1, offset,
                  ROUND_FIRST, D, HALF, INTERLEAVED, COMPUTE, BLOCK_TOKENS, BLOCK_HEADS, BLOCK)  # fmt: skip
    if k_ptr is not None:
        _gradient(dyk_ptr, k_ptr, kw_ptr, k_rstd_ptr, cos_ptr, sin_ptr, pos_ptr, dk_ptr, dkw_ptr,
                  n_tokens, n_k, n_positions, k_items, k_splits, gks0, gks1, gks2, ks0, ks1, ks2, dks0, dks1, dks2,
                  cs0, cs1, ss0, ss1, ps0, ps1, offset,
                  ROUND_FIRST, D, HALF, INTERLEAVED, COMPUTE, BLOCK_TOKENS, BLOCK_HEADS, BLOCK)  # fmt: skip
