"""The kernels that visit chunks one after another: the states, and in reverse their gradients.

A program owns the columns of a state that belong to a block of v's columns: it keeps them in registers from the first
chunk of a sequence to the last, or back. Other kernels compute everything else from the states at the chunks' starts,
for all chunks at once.

Every warp has a copy of the operands of a matmul of k and a state, which sums over the width of the heads. If these do
not fit the registers, BLOCK_D is smaller than the width: the matmul is a sum over blocks of it, and the blocks of the
state are read back from where the program has just stored them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels.ops.gated_delta_rule.triton.chunks import (
    document,
    from_start,
    load_decay,
    load_tile,
    load_tokens,
    of_chunk,
    store_tile,
    to_end,
)
from foundry_kernels.ops.gated_delta_rule.triton.products import product


@triton.jit
def _by_state(
    p_k, stride_k, p_state, b_k, b_state, n_rows, n_cols,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Returns k @ state [CHUNK, BLOCK_V], where the state has just been stored at `p_state`."""
    b_known = tl.zeros([CHUNK, BLOCK_V], COMPUTE)
    if BLOCK_D == WIDTH:
        return product(b_k, b_state, b_known, KIND, PARTS)
    else:
        tl.debug_barrier()  # other threads have stored it
        for d in range(0, D, BLOCK_D):
            b_keys = load_tile(p_k + d, stride_k, n_rows, D - d, CHUNK, BLOCK_D, D % BLOCK_D == 0)
            b_part = load_tile(p_state + d * DV, DV, D - d, n_cols, BLOCK_D, BLOCK_V, DV % BLOCK_V == 0)
            b_known = product(b_keys, b_part, b_known, KIND, PARTS)
        return b_known


@triton.jit
def _load_row(ptr, n, WIDTH: tl.constexpr):
    """[WIDTH, 1]"""
    rows = tl.arange(0, WIDTH)[:, None]
    return tl.load(ptr + rows, mask=rows < n, other=0.0)


@triton.jit(do_not_specialize=["tokens", "n_chunks"])
def gated_delta_rule_states_kernel(
    k_ptr, v_ptr, beta_ptr, decay_ptr, k_norm_ptr, k_end_ptr, total_ptr, inverse_ptr, initial_ptr, cu_seqlens_ptr,
    states_ptr, updates_ptr, final_ptr,
    tokens, n_chunks, n_heads, group, decay_size,
    stride_kb, stride_kh, stride_kt, stride_vb, stride_vh, stride_vt, stride_bb, stride_bh, stride_bt,
    stride_ib, stride_ih, stride_id,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, VARLEN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the states at the chunks' starts [B, H_v, n_chunks, D, DV], the corrected values [B, H_v, T, DV] and the
    final state [N, H_v, D, DV], if it has a pointer. Without `inverse_ptr` values are not corrected. With a decay for
    each dimension, k is decayed from the chunk's start, k_end [B, H_v, T, D] to its end, and `total` are the decays of
    chunks [B, H_v, n_chunks, D]."""
    n_blocks = tl.cdiv(DV, BLOCK_V)
    v0 = tl.program_id(0) % n_blocks * BLOCK_V
    head = (tl.program_id(0) // n_blocks % n_heads).to(tl.int64)
    n = tl.program_id(0) // n_blocks // n_heads
    batch, start, length, chunk = document(n, cu_seqlens_ptr, tokens, CHUNK, VARLEN)
    batch, kv_head = batch.to(tl.int64), head // group
    n_cols = DV - v0
    WHOLE: tl.constexpr = DV % BLOCK_V == 0
    rows = tl.arange(0, CHUNK)
    square = rows[:, None] * CHUNK + rows[None, :]
    b_state = tl.zeros([WIDTH, BLOCK_V], COMPUTE)
    if initial_ptr is not None:
        p_initial = initial_ptr + n.to(tl.int64) * stride_ib + head * stride_ih + v0
        b_state = load_tile(p_initial, stride_id, D, n_cols, WIDTH, BLOCK_V, WHOLE).to(COMPUTE)
    p_k = k_ptr + batch * stride_kb + kv_head * stride_kh
    p_v = v_ptr + batch * stride_vb + head * stride_vh + v0
    p_beta = None if beta_ptr is None else beta_ptr + batch * stride_bb + head * stride_bh
    o_tokens = (batch * n_heads + head) * tokens
    o_norms = (batch * (n_heads // group) + kv_head) * tokens
    p_norm = None if k_norm_ptr is None else k_norm_ptr + o_norms
    at_first = (batch * n_heads + head) * n_chunks + chunk
    for done in range(0, length, CHUNK):
        first = tl.cast(start + done, tl.int64)
        n_rows = length - done
        at = at_first + done // CHUNK
        store_tile(states_ptr + at * (D * DV) + v0, DV, b_state, D, n_cols, WIDTH, BLOCK_V, WHOLE)
        b_k = load_tile(p_k + first * stride_kt, stride_kt, n_rows, D, CHUNK, WIDTH, D == WIDTH)
        b_v = load_tile(p_v + first * stride_vt, stride_vt, n_rows, n_cols, CHUNK, BLOCK_V, WHOLE).to(COMPUTE)
        b_beta = load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK, 1.0)
        b_norm = load_tokens(p_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0)
        decay = load_decay(decay_ptr, o_tokens + first, decay_size, tl.minimum(n_rows, CHUNK), COMPUTE, CHUNK)
        if inverse_ptr is None:
            b_u = b_v * b_beta[:, None]
        else:
            b_known = _by_state(
                p_k + first * stride_kt, stride_kt, states_ptr + at * (D * DV) + v0, b_k, b_state, n_rows, n_cols,
                KIND, COMPUTE, D, DV, WIDTH, BLOCK_D, BLOCK_V, CHUNK, PARTS,
            )  # fmt: skip
            b_r = (b_v - b_known * (from_start(decay) * b_norm)[:, None]) * b_beta[:, None]
            b_inverse = tl.load(inverse_ptr + at * (CHUNK * CHUNK) + square)
            b_u = product(b_inverse, b_r, tl.zeros([CHUNK, BLOCK_V], COMPUTE), KIND, PARTS)
        p_u = updates_ptr + (o_tokens + first) * DV + v0
        store_tile(p_u, DV, b_u, n_rows, n_cols, CHUNK, BLOCK_V, WHOLE)
        if k_end_ptr is None:
            b_u *= (to_end(decay) * b_norm)[:, None]
            b_state = product(tl.trans(b_k), b_u, b_state * of_chunk(decay), KIND, PARTS)
        else:
            b_k = load_tile(k_end_ptr + (o_tokens + first) * D, D, n_rows, D, CHUNK, WIDTH, D == WIDTH)
            b_state = product(tl.trans(b_k), b_u, b_state * _load_row(total_ptr + at * D, D, WIDTH), KIND, PARTS)
    if final_ptr is not None:
        p_final = final_ptr + (tl.program_id(0) // n_blocks).to(tl.int64) * (D * DV) + v0
        store_tile(p_final, DV, b_state, D, n_cols, WIDTH, BLOCK_V, WHOLE)


@triton.jit(do_not_specialize=["tokens", "n_chunks"])
def gated_delta_rule_dstates_kernel(
    q_ptr, k_ptr, beta_ptr, dout_ptr, decay_ptr, q_norm_ptr, k_norm_ptr, k_end_ptr, total_ptr, inverse_ptr, dfinal_ptr,
    cu_seqlens_ptr, dstates_ptr, dr_ptr, dinitial_ptr,
    tokens, n_chunks, n_heads, group, decay_size, scale,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_kt, stride_bb, stride_bh, stride_bt,
    stride_ob, stride_oh, stride_ot, stride_fb, stride_fh, stride_fd,
    KIND: tl.constexpr, COMPUTE: tl.constexpr, VARLEN: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Writes the gradients of the states at the chunks' ends [B, H_v, n_chunks, D, DV], of the initial state, and of
    the values r that the triangle is solved for [B, H_v, T, DV]; `dr_ptr` holds what `prepare` wrote before. With a
    decay for each dimension, q and k are decayed from the chunk's start; see `states` for k_end and `total`."""
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter truncates a bare float to float32 where a function takes it
    scale = b_zero + scale
    n_blocks = tl.cdiv(DV, BLOCK_V)
    v0 = tl.program_id(0) % n_blocks * BLOCK_V
    head = (tl.program_id(0) // n_blocks % n_heads).to(tl.int64)
    n = tl.program_id(0) // n_blocks // n_heads
    batch, start, length, chunk = document(n, cu_seqlens_ptr, tokens, CHUNK, VARLEN)
    batch, kv_head = batch.to(tl.int64), head // group
    n_cols = DV - v0
    WHOLE: tl.constexpr = DV % BLOCK_V == 0
    rows = tl.arange(0, CHUNK)
    square = rows[:, None] * CHUNK + rows[None, :]
    b_dstate = tl.zeros([WIDTH, BLOCK_V], COMPUTE)
    if dfinal_ptr is not None:
        p_dfinal = dfinal_ptr + n.to(tl.int64) * stride_fb + head * stride_fh + v0
        b_dstate = load_tile(p_dfinal, stride_fd, D, n_cols, WIDTH, BLOCK_V, WHOLE).to(COMPUTE)
    p_q = q_ptr + batch * stride_qb + kv_head * stride_qh
    p_k = k_ptr + batch * stride_kb + kv_head * stride_kh
    p_dout = dout_ptr + batch * stride_ob + head * stride_oh + v0
    p_beta = None if beta_ptr is None else beta_ptr + batch * stride_bb + head * stride_bh
    o_tokens = (batch * n_heads + head) * tokens
    o_norms = (batch * (n_heads // group) + kv_head) * tokens
    p_q_norm = None if q_norm_ptr is None else q_norm_ptr + o_norms
    p_k_norm = None if k_norm_ptr is None else k_norm_ptr + o_norms
    at_first = (batch * n_heads + head) * n_chunks + chunk
    for back in range(0, length, CHUNK):
        done = tl.cdiv(length, CHUNK) * CHUNK - CHUNK - back
        first = tl.cast(start + done, tl.int64)
        n_rows = length - done
        at = at_first + done // CHUNK
        store_tile(dstates_ptr + at * (D * DV) + v0, DV, b_dstate, D, n_cols, WIDTH, BLOCK_V, WHOLE)
        b_k = load_tile(p_k + first * stride_kt, stride_kt, n_rows, D, CHUNK, WIDTH, D == WIDTH)
        b_k_norm = load_tokens(p_k_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0)
        decay = load_decay(decay_ptr, o_tokens + first, decay_size, tl.minimum(n_rows, CHUNK), COMPUTE, CHUNK)
        p_dr = dr_ptr + (o_tokens + first) * DV + v0
        if k_end_ptr is None:
            b_du = _by_state(
                p_k + first * stride_kt, stride_kt, dstates_ptr + at * (D * DV) + v0, b_k, b_dstate, n_rows, n_cols,
                KIND, COMPUTE, D, DV, WIDTH, BLOCK_D, BLOCK_V, CHUNK, PARTS,
            )  # fmt: skip
            b_du *= (to_end(decay) * b_k_norm)[:, None]
        else:
            p_end = k_end_ptr + (o_tokens + first) * D
            b_end = load_tile(p_end, D, n_rows, D, CHUNK, WIDTH, D == WIDTH)
            b_du = _by_state(
                p_end, D, dstates_ptr + at * (D * DV) + v0, b_end, b_dstate, n_rows, n_cols,
                KIND, COMPUTE, D, DV, WIDTH, BLOCK_D, BLOCK_V, CHUNK, PARTS,
            )  # fmt: skip
        b_du += load_tile(p_dr, DV, n_rows, n_cols, CHUNK, BLOCK_V, WHOLE)
        b_left = from_start(decay)
        b_dstate *= of_chunk(decay) if k_end_ptr is None else _load_row(total_ptr + at * D, D, WIDTH)
        if inverse_ptr is not None:
            b_inverse = tl.load(inverse_ptr + at * (CHUNK * CHUNK) + square)
            b_du = product(tl.trans(b_inverse), b_du, tl.zeros([CHUNK, BLOCK_V], COMPUTE), KIND, PARTS)
            b_beta = load_tokens(p_beta, first, stride_bt, n_rows, COMPUTE, CHUNK, 1.0)
            b_known = b_du * (b_left * b_beta * b_k_norm)[:, None]
            b_dstate = product(tl.trans(b_k), -b_known, b_dstate, KIND, PARTS)
        b_q = load_tile(p_q + first * stride_qt, stride_qt, n_rows, D, CHUNK, WIDTH, D == WIDTH)
        b_dout = load_tile(p_dout + first * stride_ot, stride_ot, n_rows, n_cols, CHUNK, BLOCK_V, WHOLE)
        b_q_norm = load_tokens(p_q_norm, first, 1, n_rows, COMPUTE, CHUNK, 1.0) * scale
        b_dout_q = b_dout.to(COMPUTE) * (b_left * b_q_norm)[:, None]
        b_dstate = product(tl.trans(b_q), b_dout_q, b_dstate, KIND, PARTS)
        store_tile(p_dr, DV, b_du, n_rows, n_cols, CHUNK, BLOCK_V, WHOLE)
    if dinitial_ptr is not None:
        p_dinitial = dinitial_ptr + (tl.program_id(0) // n_blocks).to(tl.int64) * (D * DV) + v0
        store_tile(p_dinitial, DV, b_dstate, D, n_cols, WIDTH, BLOCK_V, WHOLE)
