"""The forward kernel: a program owns a tile of queries of one head and visits the keys once, with a running softmax.

The bounds of the loops skip keys outside of the window. Tiles are visited from the right: those on its right edge,
which are masked, come first; those between its edges are not masked, and need no bounds of the tensors.
b_ is a block of values, m_ a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import dot, round_to
from foundry_kernels.ops.flash_attention.triton.block_range import block_range
from foundry_kernels.ops.flash_attention.triton.finish import finish_rows
from foundry_kernels.ops.flash_attention.triton.mask import seen_keys
from foundry_kernels.ops.flash_attention.triton.order import program_order
from foundry_kernels.ops.flash_attention.triton.scores import load_slope, score_factor, scores
from foundry_kernels.ops.flash_attention.triton.seqlen_info import seqlen_info
from foundry_kernels.ops.flash_attention.triton.softmax import online_softmax
from foundry_kernels.ops.flash_attention.triton.tile_io import load_rows


@triton.jit
def _products(b_q, k_ptr, stride_ks, tile, m_keys, CHECK: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
              BLOCK_N: tl.constexpr):  # fmt: skip
    """[M, N]: of the queries with one tile of keys; with CHECK only `m_keys` are read, [N, 1] or one for all."""
    p_k = k_ptr + tl.cast(tl.multiple_of(tile * BLOCK_N, BLOCK_N), tl.int64) * stride_ks
    dims = tl.arange(0, BLOCK_D)[None, :]
    p_k += tl.arange(0, BLOCK_N)[:, None] * stride_ks + dims
    if CHECK and D != BLOCK_D:
        b_k = tl.load(p_k, mask=m_keys & (dims < D), other=0.0)
    elif CHECK:
        b_k = tl.load(p_k, mask=m_keys, other=0.0)
    elif D != BLOCK_D:
        b_k = tl.load(p_k, mask=dims < D, other=0.0)
    else:
        b_k = tl.load(p_k)
    return dot(b_q, tl.trans(b_k))


@triton.jit
def _attend_range(
    b_acc, b_m, b_l, b_e, b_qk, b_q, q_pos, k_ptr, v_ptr, stride_ks, stride_vs, first_tile, begin, end, seqlen_k,
    scale, softcap, slope, left, right,
    MASKED: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, SAVE_STATS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Attend to the tiles end - 1, .., begin of keys; q_pos [M, 1] is the position of each query among the keys.

    AHEAD: b_qk are the products with the keys of tile end - 1, and what is returned those of tile begin - 1. Each
    tile's are begun before the softmax of the tile to its right, which hides them where products are asynchronous;
    those beyond `first_tile` are of no use. It takes the registers of one more tile of scores.
    """
    factor = score_factor(scale, HAS_SOFTCAP, HAS_ALIBI)
    for tile in range(end - 1, begin - 1, -1):
        j0 = tl.multiple_of(tile * BLOCK_N, BLOCK_N)
        if AHEAD:  # the next tile is whole; where there is none, nothing is loaded or, in whole tiles, this one again
            b_now, ahead = b_qk, tl.maximum(tile - 1, first_tile)
            b_qk = _products(b_q, k_ptr, stride_ks, ahead, ahead < tile, MASKED, D, BLOCK_D, BLOCK_N)
        else:
            m_keys = tl.arange(0, BLOCK_N)[:, None] < seqlen_k - j0
            b_now = _products(b_q, k_ptr, stride_ks, tile, m_keys, MASKED, D, BLOCK_D, BLOCK_N)
        cols = j0 + tl.arange(0, BLOCK_N)[None, :]
        b_s, _b_t = scores(b_now, cols - q_pos, scale, softcap, slope, HAS_SOFTCAP, HAS_ALIBI)
        if MASKED:
            m_seen = seen_keys(j0, BLOCK_N, q_pos, seqlen_k, left, right, HAS_LEFT, HAS_RIGHT)
            b_s = tl.where(m_seen, b_s, -float("inf"))
        b_p, b_shrink, b_m, b_l, b_e = online_softmax(b_s, factor, b_m, b_l, b_e, MASKED, SAVE_STATS)
        p_v = v_ptr + tl.cast(j0, tl.int64) * stride_vs
        b_v = load_rows(p_v, stride_vs, seqlen_k - j0, BLOCK_N, BLOCK_DV, DV, MASKED)  # [N, DV]
        b_acc = dot(round_to(b_p, b_v.dtype), b_v, b_acc * b_shrink[:, None])
    return b_acc, b_m, b_l, b_e, b_qk


@triton.jit(do_not_specialize=["section"])
def flash_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, entropy_ptr, max_logit_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr, sinks_ptr,
    n_batch, n_heads, group, section, tokens_q, tokens_k,
    stride_qb, stride_qh, stride_qt, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    stride_ob, stride_oh, stride_ot, stride_lseb, stride_alibi, scale, softcap, left, right,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SINKS: tl.constexpr,
    SAVE_LSE: tl.constexpr, SAVE_STATS: tl.constexpr, COMPUTE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Under a causal mask the last tiles have most to do, so they come first in their section. `stride_lseb` is the
    batch stride of lse, entropy and max_logit, `stride_alibi` that of the slopes."""
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter truncates a bare float to float32 where a function takes it
    scale, softcap = b_zero + scale, b_zero + softcap
    n, head, tile, tiles = program_order(n_batch, n_heads, section)
    if HAS_RIGHT:
        tile = tiles - 1 - tile
    start_q, seqlen_q, start_k, seqlen_k = seqlen_info(
        n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN
    )
    i0 = tile * BLOCK_M
    if i0 >= seqlen_q:
        return
    first = tl.cast(start_q, tl.int64) + i0
    rows = i0 + tl.arange(0, BLOCK_M)  # [M]
    offset = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    q_pos = (rows + offset)[:, None]
    p_q = q_ptr + n * stride_qb + head * stride_qh + first * stride_qt
    b_q = load_rows(p_q, stride_qt, seqlen_q - i0, BLOCK_M, BLOCK_D, D, True)
    k_ptr += n * stride_kb + head // group * stride_kh + tl.cast(start_k, tl.int64) * stride_ks
    v_ptr += n * stride_vb + head // group * stride_vh + tl.cast(start_k, tl.int64) * stride_vs
    slope = load_slope(alibi_slopes_ptr, stride_alibi, n, head, HAS_ALIBI, COMPUTE)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], COMPUTE)
    b_m = tl.full([BLOCK_M], -float("inf"), COMPUTE)
    b_l = tl.zeros([BLOCK_M], COMPUTE)
    b_e = tl.zeros([BLOCK_M], COMPUTE)
    start, full_start, full_stop, stop = block_range(i0, seqlen_q, seqlen_k, offset, left, right, HAS_LEFT, HAS_RIGHT,
                                                     BLOCK_M, BLOCK_N)  # fmt: skip
    first_tile, full_tile, end = start // BLOCK_N, full_start // BLOCK_N, tl.cdiv(stop, BLOCK_N)
    masked_tile = tl.maximum(full_start, full_stop) // BLOCK_N
    b_qk = b_zero  # stands for no products: Triton 3.6 takes no None out of a function
    if AHEAD:
        last_tile = tl.maximum(end - 1, 0)
        m_keys = tl.arange(0, BLOCK_N)[:, None] < seqlen_k - last_tile * BLOCK_N
        b_qk = _products(b_q, k_ptr, stride_ks, last_tile, m_keys, True, D, BLOCK_D, BLOCK_N)
    b_acc, b_m, b_l, b_e, b_qk = _attend_range(
        b_acc, b_m, b_l, b_e, b_qk, b_q, q_pos, k_ptr, v_ptr, stride_ks, stride_vs, first_tile,
        masked_tile, end, seqlen_k, scale, softcap, slope, left, right,
        True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, SAVE_STATS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, AHEAD,
    )  # fmt: skip
    b_acc, b_m, b_l, b_e, b_qk = _attend_range(
        b_acc, b_m, b_l, b_e, b_qk, b_q, q_pos, k_ptr, v_ptr, stride_ks, stride_vs, first_tile,
        full_tile, full_stop // BLOCK_N, seqlen_k, scale, softcap, slope, left, right,
        False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, SAVE_STATS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, AHEAD,
    )  # fmt: skip
    if HAS_LEFT:
        b_acc, b_m, b_l, b_e, b_qk = _attend_range(
            b_acc, b_m, b_l, b_e, b_qk, b_q, q_pos, k_ptr, v_ptr, stride_ks, stride_vs, first_tile,
            first_tile, tl.minimum(full_tile, end), seqlen_k, scale, softcap, slope, left, right,
            True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, SAVE_STATS, D, DV, BLOCK_D, BLOCK_DV, BLOCK_N, AHEAD,
        )  # fmt: skip
    at = n * stride_lseb + head * tokens_q + first + tl.arange(0, BLOCK_M)
    p_out = out_ptr + n * stride_ob + head * stride_oh + first * stride_ot
    finish_rows(
        b_acc, b_m, b_l, b_e, rows < seqlen_q, head, p_out + tl.arange(0, BLOCK_M)[:, None] * stride_ot, at,
        lse_ptr, entropy_ptr, max_logit_ptr, sinks_ptr, HAS_SINKS, SAVE_LSE, SAVE_STATS, DV, BLOCK_DV,
    )  # fmt: skip
