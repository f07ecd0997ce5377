"""The gates of g and beta: what opens them in the kernels that read g first, and their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import round_to
from foundry_kernels.ops.gated_delta_rule.triton.chunks import load_tile, load_tokens, place_of, store_tile


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log(1 + t), t = exp(-|x|). In float32 log(1 + t) = 2 artanh(s), s = t / (2 + t) <=
    1/3, by its series: a GPU's logarithm is not exact near 1."""
    t = tl.exp(-tl.abs(x))
    if x.dtype == tl.float64:
        u = 1.0 + t
        rest = tl.where(u == 1.0, t, tl.log(u) * (t / tl.where(u == 1.0, 1.0, u - 1.0)))
    else:
        s = t / (2.0 + t)
        s2 = s * s
        p = 0.06666667 + s2 * 0.05882353
        p = 0.11111111 + s2 * (0.09090909 + s2 * (0.07692308 + s2 * p))
        rest = 2.0 * s * (1.0 + s2 * (0.33333333 + s2 * (0.2 + s2 * (0.14285714 + s2 * p))))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def logistic(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def open_beta(b_beta, BETA_LIMIT: tl.constexpr):
    return BETA_LIMIT * logistic(b_beta)


@triton.jit
def _close(b_dg, b_x, rate):
    """The gradients of the gate's input and of A_log."""
    return -b_dg * rate * logistic(b_x), -b_dg * rate * softplus(b_x)


@triton.jit(do_not_specialize=["tokens", "n_chunks", "n_documents"])
def gated_delta_rule_gates_kernel(
    g_ptr, beta_ptr, decay_log_ptr, dt_bias_ptr, dg_open_ptr, dbeta_open_ptr, cu_seqlens_ptr,
    dg_ptr, dbeta_ptr, ddecay_log_ptr, ddt_bias_ptr,
    n_documents, tokens, n_chunks, n_heads, group, size, scale,
    stride_gb, stride_gh, stride_gt, stride_bb, stride_bh, stride_bt,
    COMPUTE: tl.constexpr, DOCUMENTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr, BETA_LIMIT: tl.constexpr,
):  # fmt: skip
    """For a chunk and a head, writes the gradients of the gates' inputs from those of g and beta, and of the gates'
    parameters the sums over the chunk's tokens: [B, H_v, n_chunks], and with channels of dt_bias [B, H_v, n_chunks,
    D]."""
    i = tl.program_id(0) // n_heads
    head = (tl.program_id(0) % n_heads).to(tl.int64)
    place = place_of(i, cu_seqlens_ptr, n_documents, tokens, n_chunks, CHUNK, DOCUMENTS)
    if place.n_rows <= 0:
        return
    batch, first, n_rows = place.batch, place.first, place.n_rows
    rows = tl.arange(0, CHUNK)
    cols = tl.arange(0, BLOCK_D)
    m = rows < n_rows
    o = (batch * n_heads + head) * tokens + first
    o_chunk = (batch * n_heads + head) * n_chunks + place.chunk
    if dbeta_ptr is not None:
        p_beta = beta_ptr + batch * stride_bb + head * stride_bh
        b_x = load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK)
        b_dbeta = tl.load(dbeta_open_ptr + o + rows, mask=m, other=0.0) * BETA_LIMIT * logistic(b_x) * logistic(-b_x)
        tl.store(dbeta_ptr + o + rows, round_to(b_dbeta, dbeta_ptr.dtype.element_ty), mask=m)
    if dg_open_ptr is not None:
        rate = tl.exp(tl.load(decay_log_ptr + head).to(COMPUTE))
        p_g = g_ptr + batch * stride_gb + head * stride_gh
        if CHANNELS:
            of_log = tl.zeros([], COMPUTE)
            for d in range(0, D, BLOCK_D):
                m_cols = cols < D - d
                b_x = load_tile(p_g + first * stride_gt + d, stride_gt, n_rows, D - d, CHUNK, BLOCK_D, False)
                b_x = b_x.to(COMPUTE)
                if dt_bias_ptr is not None:
                    b_x += tl.load(dt_bias_ptr + head * D + d + cols, mask=m_cols, other=0.0).to(COMPUTE)[None, :]
                b_dg = load_tile(dg_open_ptr + o * D + d, D, n_rows, D - d, CHUNK, BLOCK_D, False)
                b_before, b_log = _close(b_dg, b_x, rate)
                of_log += tl.sum(tl.sum(b_log, 1), 0)
                if dg_ptr is not None:
                    b_dg = round_to(b_before, dg_ptr.dtype.element_ty)
                    store_tile(dg_ptr + o * D + d, D, b_dg, n_rows, D - d, CHUNK, BLOCK_D, False)
                if ddt_bias_ptr is not None:
                    tl.store(ddt_bias_ptr + o_chunk * D + d + cols, tl.sum(b_before, 0), mask=m_cols)
        else:
            b_x = load_tokens(p_g, first, stride_gt, n_rows, COMPUTE, CHUNK)
            if dt_bias_ptr is not None:
                b_x += tl.load(dt_bias_ptr + head).to(COMPUTE)
            b_before, b_log = _close(tl.load(dg_open_ptr + o + rows, mask=m, other=0.0), b_x, rate)
            of_log = tl.sum(b_log, 0)
            if dg_ptr is not None:
                tl.store(dg_ptr + o + rows, round_to(b_before, dg_ptr.dtype.element_ty), mask=m)
            if ddt_bias_ptr is not None:
                tl.store(ddt_bias_ptr + o_chunk, tl.sum(b_before, 0))
        if ddecay_log_ptr is not None:
            tl.store(ddecay_log_ptr + o_chunk, of_log)
