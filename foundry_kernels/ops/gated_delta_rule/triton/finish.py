"""The last kernel of the backward pass: sums over blocks of columns, and the gradient of `qk_l2norm`."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels.ops.gated_delta_rule.triton.chunks import load_tile, load_tokens, place_of, store_tile


@triton.jit
def _through_norm(
    p_x, stride_x, p_norm, p_dy, p_dx, stride_dx, n_rows,
    COMPUTE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the gradient of x from `dy`, that of y = x * norm times norm."""
    b_norm = load_tokens(p_norm, 0, 1, n_rows, COMPUTE, CHUNK)
    b_x = load_tile(p_x, stride_x, n_rows, D, CHUNK, BLOCK_D, D == BLOCK_D).to(COMPUTE)
    b_dy = load_tile(p_dy, D, n_rows, D, CHUNK, BLOCK_D, D == BLOCK_D)
    b_along = tl.sum(b_dy * b_x, 1) * b_norm * b_norm
    b_dx = round_to(b_dy - b_x * b_along[:, None], p_dx.dtype.element_ty)
    store_tile(p_dx, stride_dx, b_dx, n_rows, D, CHUNK, BLOCK_D, D == BLOCK_D)


@triton.jit(do_not_specialize=["tokens", "n_chunks", "n_documents"])
def gated_delta_rule_finish_kernel(
    sums_ptr, q_ptr, k_ptr, beta_ptr, q_norm_ptr, k_norm_ptr, dq_norm_ptr, dk_norm_ptr, cu_seqlens_ptr,
    dg_ptr, dbeta_ptr, dq_ptr, dk_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, n_blocks,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_bb, stride_bh, stride_bt,
    stride_dqb, stride_dqh, stride_dqt, stride_dkb, stride_dkh, stride_dkt,
    COMPUTE: tl.constexpr, DELTA: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """For one chunk and head of q and k, writes the gradients of g and beta [B, H_v, T] from the `sums` of the kernels
    `pairs` and `dqk`, and those of q and k from the gradients of the normalized ones [B, H_k, T, D], if given."""
    n_kv_heads = n_heads // group
    i = tl.program_id(0) // n_kv_heads
    kv_head = (tl.program_id(0) % n_kv_heads).to(tl.int64)
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    batch, first, n_rows = place.batch, place.first, place.n_rows
    rows = tl.arange(0, CHUNK)
    m = rows < n_rows
    if sums_ptr is not None:
        for head in range(kv_head * group, kv_head * group + group):
            o = (batch * n_heads + head) * tokens + first
            b_sums = tl.load(sums_ptr + o + rows, mask=m, other=0.0)
            b_of_r = tl.zeros([CHUNK], COMPUTE)
            b_of_updates = tl.zeros([CHUNK], COMPUTE)
            of_state = tl.zeros([], COMPUTE)
            for block in range(n_blocks):
                p_block = sums_ptr + (2 + 4 * tl.cast(block, tl.int64)) * size + o
                b_sums += tl.load(p_block + rows, mask=m, other=0.0)
                if DELTA:
                    b_of_r += tl.load(p_block + size + rows, mask=m, other=0.0)
                b_of_updates += tl.load(p_block + 2 * size + rows, mask=m, other=0.0)
                of_state += tl.load(p_block + 3 * size)
            p_beta = None if beta_ptr is None else beta_ptr + batch * stride_bb + head * stride_bh
            b_sums += b_of_r * load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK, 1.0)
            if dbeta_ptr is not None:
                b_dbeta = b_of_r + tl.load(sums_ptr + size + o + rows, mask=m, other=0.0)
                tl.store(dbeta_ptr + o + rows, round_to(b_dbeta, dbeta_ptr.dtype.element_ty), mask=m)
            if dg_ptr is not None:
                b_dg = tl.cumsum(b_sums.to(tl.float64), 0, reverse=True).to(COMPUTE) + of_state
                # An update decays after its token. Without differences of sums, tiny gradients are exact too.
                b_dg += tl.sum(tl.where(rows[None, :] < rows[:, None], b_of_updates[None, :], 0.0), 1)
                tl.store(dg_ptr + o + rows, round_to(b_dg, dg_ptr.dtype.element_ty), mask=m)
    o = (batch * n_kv_heads + kv_head) * tokens + first
    if dq_norm_ptr is not None:
        p_q = q_ptr + batch * stride_qb + kv_head * stride_qh + first * stride_qt
        p_dq = dq_ptr + batch * stride_dqb + kv_head * stride_dqh + first * stride_dqt
        _through_norm(
            p_q, stride_qt, q_norm_ptr + o, dq_norm_ptr + o * D, p_dq, stride_dqt, n_rows, COMPUTE, D, BLOCK_D, CHUNK
        )
    if dk_norm_ptr is not None:
        p_k = k_ptr + batch * stride_kb + kv_head * stride_kh + first * stride_kt
        p_dk = dk_ptr + batch * stride_dkb + kv_head * stride_dkh + first * stride_dkt
        _through_norm(
            p_k, stride_kt, k_norm_ptr + o, dk_norm_ptr + o * D, p_dk, stride_dkt, n_rows, COMPUTE, D, BLOCK_D, CHUNK
        )
