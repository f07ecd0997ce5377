"""The last kernels of the backward pass: sums over blocks of columns, and the gradient of `qk_l2norm`."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels.ops.gated_delta_rule.triton.chunks import load_tile, load_tokens, place_of, store_tile


@triton.jit(do_not_specialize=["tokens", "n_chunks", "n_documents"])
def gated_delta_rule_finish_kernel(
    beta_ptr, of_pairs_ptr, of_q_ptr, of_k_ptr, cu_seqlens_ptr, dg_ptr, dbeta_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, blocks_q, blocks_k, stride_bb, stride_bh, stride_bt,
    COMPUTE: tl.constexpr, DELTA: tl.constexpr, DOCUMENTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of g and beta [B, H_v, T] from the `sums` of the kernels `pairs`, `dq` and `dk`, for one
    chunk and head."""
    i = tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    rows = tl.arange(0, CHUNK)
    m = rows < place.n_rows
    o = (place.batch * n_heads + head) * tokens + place.first
    p_beta = None if beta_ptr is None else beta_ptr + place.batch * stride_bb + head * stride_bh
    b_beta = load_tokens(p_beta, place.first, stride_bt, place.n_rows, COMPUTE, CHUNK, 1.0)
    b_of_r = tl.zeros([CHUNK], COMPUTE)
    b_of_updates = tl.zeros([CHUNK], COMPUTE)
    of_state = tl.zeros([], COMPUTE)
    for block in range(blocks_k):
        p_block = of_k_ptr + 3 * tl.cast(block, tl.int64) * size + o
        if DELTA:
            b_of_r += tl.load(p_block + rows, mask=m, other=0.0)
        b_of_updates += tl.load(p_block + size + rows, mask=m, other=0.0)
        of_state += tl.load(p_block + 2 * size)
    if dbeta_ptr is not None:
        b_dbeta = b_of_r + tl.load(of_pairs_ptr + size + o + rows, mask=m, other=0.0)
        tl.store(dbeta_ptr + o + rows, round_to(b_dbeta, dbeta_ptr.dtype.element_ty), mask=m)
    if dg_ptr is not None:
        b_sums = tl.load(of_pairs_ptr + o + rows, mask=m, other=0.0) + b_of_r * b_beta
        for block in range(blocks_q):
            b_sums += tl.load(of_q_ptr + tl.cast(block, tl.int64) * size + o + rows, mask=m, other=0.0)
        b_dg = tl.cumsum(b_sums.to(tl.float64), 0, reverse=True).to(COMPUTE) + of_state
        # An update decays after its token. Without differences of sums, tiny gradients are exact too.
        b_dg += tl.sum(tl.where(rows[None, :] < rows[:, None], b_of_updates[None, :], 0.0), 1)
        tl.store(dg_ptr + o + rows, round_to(b_dg, dg_ptr.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["tokens"])
def gated_delta_rule_dnorm_kernel(
    x_ptr, norm_ptr, dy_ptr, dx_ptr,
    tokens, n_heads, stride_xb, stride_xh, stride_xt, stride_dxb, stride_dxh, stride_dxt,
    COMPUTE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """The gradient of x from `dy` [B, H_k, T, D], that of y = x * norm times norm, for a block of tokens of one
    head."""
    n_blocks = tl.cdiv(tokens, BLOCK_ROWS)
    first = (tl.program_id(0) % n_blocks * BLOCK_ROWS).to(tl.int64)
    head = (tl.program_id(0) // n_blocks % n_heads).to(tl.int64)
    batch = (tl.program_id(0) // n_blocks // n_heads).to(tl.int64)
    n_rows = tokens - first
    o = (batch * n_heads + head) * tokens
    b_norm = load_tokens(norm_ptr + o, first, 1, n_rows, COMPUTE, BLOCK_ROWS)
    p_x = x_ptr + batch * stride_xb + head * stride_xh + first * stride_xt
    b_x = load_tile(p_x, stride_xt, n_rows, D, BLOCK_ROWS, BLOCK_D, D == BLOCK_D).to(COMPUTE)
    b_dy = load_tile(dy_ptr + (o + first) * D, D, n_rows, D, BLOCK_ROWS, BLOCK_D, D == BLOCK_D)
    b_along = tl.sum(b_dy * b_x, 1) * b_norm * b_norm
    p_dx = dx_ptr + batch * stride_dxb + head * stride_dxh + first * stride_dxt
    b_dx = round_to(b_dy - b_x * b_along[:, None], dx_ptr.dtype.element_ty)
    store_tile(p_dx, stride_dxt, b_dx, n_rows, D, BLOCK_ROWS, BLOCK_D, D == BLOCK_D)
