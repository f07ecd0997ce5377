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
from foundry_kernels.ops.flash_attention.triton.bundles import Mask, Results, Scoring, Sizes, State
from foundry_kernels.ops.flash_attention.triton.finish import finish_rows
from foundry_kernels.ops.flash_attention.triton.mask import seen_keys
from foundry_kernels.ops.flash_attention.triton.order import program_order
from foundry_kernels.ops.flash_attention.triton.scores import load_slope, score_factor, scores
from foundry_kernels.ops.flash_attention.triton.seqlen_info import seqlen_info
from foundry_kernels.ops.flash_attention.triton.softmax import online_softmax
from foundry_kernels.ops.flash_attention.triton.tile_io import head_keys, head_rows, load_rows, rows_from


@triton.jit
def _products(b_q, k, tile, m_keys, CHECK: tl.constexpr, sizes):
    """[M, N]: of the queries with one tile of keys; with CHECK only `m_keys` are read, [N, 1] or one for all."""
    p_k = k.ptr + tl.cast(tl.multiple_of(tile * sizes.BLOCK_N, sizes.BLOCK_N), tl.int64) * k.stride
    dims = tl.arange(0, sizes.BLOCK_D)[None, :]
    p_k += tl.arange(0, sizes.BLOCK_N)[:, None] * k.stride + dims
    if CHECK and sizes.D != sizes.BLOCK_D:
        b_k = tl.load(p_k, mask=m_keys & (dims < sizes.D), other=0.0)
    elif CHECK:
        b_k = tl.load(p_k, mask=m_keys, other=0.0)
    elif sizes.D != sizes.BLOCK_D:
        b_k = tl.load(p_k, mask=dims < sizes.D, other=0.0)
    else:
        b_k = tl.load(p_k)
    return dot(b_q, tl.trans(b_k))


@triton.jit
def _attend_range(
    b_acc, state, b_qk, b_q, q_pos, keys, first_tile, begin, end, scoring, mask,
    MASKED: tl.constexpr, SAVE_STATS: tl.constexpr, AHEAD: tl.constexpr, sizes,
):  # fmt: skip
    """Attend to the tiles end - 1, .., begin of keys; q_pos [M, 1] is the position of each query among the keys.

    AHEAD: b_qk are the products with the keys of tile end - 1, and what is returned those of tile begin - 1. Each
    tile's are begun before the softmax of the tile to its right, which hides them where products are asynchronous;
    those beyond `first_tile` are of no use. It takes the registers of one more tile of scores.
    """
    factor = score_factor(scoring)
    for tile in range(end - 1, begin - 1, -1):
        j0 = tl.multiple_of(tile * sizes.BLOCK_N, sizes.BLOCK_N)
        if AHEAD:  # the next tile is whole; where there is none, nothing is loaded or, in whole tiles, this one again
            b_now, following = b_qk, tl.maximum(tile - 1, first_tile)
            b_qk = _products(b_q, keys.k, following, following < tile, MASKED, sizes)
        else:
            m_keys = tl.arange(0, sizes.BLOCK_N)[:, None] < keys.seqlen - j0
            b_now = _products(b_q, keys.k, tile, m_keys, MASKED, sizes)
        cols = j0 + tl.arange(0, sizes.BLOCK_N)[None, :]
        b_s, _b_t = scores(b_now, cols - q_pos, scoring)
        if MASKED:
            m_seen = seen_keys(j0, sizes.BLOCK_N, q_pos, keys.seqlen, mask)
            b_s = tl.where(m_seen, b_s, -float("inf"))
        b_p, b_shrink, state = online_softmax(b_s, factor, state, MASKED, SAVE_STATS)
        b_v = load_rows(rows_from(keys.v, j0), keys.seqlen - j0, sizes.BLOCK_N, sizes.BLOCK_DV, sizes.DV, MASKED)
        b_acc = dot(round_to(b_p, b_v.dtype), b_v, b_acc * b_shrink[:, None])
    return b_acc, state, b_qk


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
    sizes: tl.constexpr = Sizes(D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N)
    b_zero = tl.full([], 0.0, COMPUTE)  # the interpreter truncates a bare float to float32 where a function takes it
    scale, softcap = b_zero + scale, b_zero + softcap if HAS_SOFTCAP else None
    mask = Mask(left if HAS_LEFT else None, right if HAS_RIGHT else None)
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
    q = head_rows(q_ptr, stride_qb, stride_qh, stride_qt, n, head, first)
    b_q = load_rows(q, seqlen_q - i0, BLOCK_M, BLOCK_D, D, True)
    keys = head_keys(k_ptr, v_ptr, stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
                     n, head, group, start_k, seqlen_k)  # fmt: skip
    slope = load_slope(alibi_slopes_ptr, stride_alibi, n, head, COMPUTE) if HAS_ALIBI else None
    scoring = Scoring(scale, softcap, slope)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], COMPUTE)
    b_m = tl.full([BLOCK_M], -float("inf"), COMPUTE)
    state = State(b_m, tl.zeros([BLOCK_M], COMPUTE), tl.zeros([BLOCK_M], COMPUTE))
    cols = block_range(i0, seqlen_q, seqlen_k, offset, mask, BLOCK_M, BLOCK_N)
    first_tile, full_tile, end = cols.start // BLOCK_N, cols.full_start // BLOCK_N, tl.cdiv(cols.stop, BLOCK_N)
    masked_tile = tl.maximum(cols.full_start, cols.full_stop) // BLOCK_N
    b_qk = b_zero  # stands for no products: Triton 3.6 takes no None out of a function
    if AHEAD:
        last_tile = tl.maximum(end - 1, 0)
        m_keys = tl.arange(0, BLOCK_N)[:, None] < seqlen_k - last_tile * BLOCK_N
        b_qk = _products(b_q, keys.k, last_tile, m_keys, True, sizes)
    b_acc, state, b_qk = _attend_range(
        b_acc, state, b_qk, b_q, q_pos, keys, first_tile, masked_tile, end, scoring, mask,
        True, SAVE_STATS, AHEAD, sizes,
    )  # fmt: skip
    b_acc, state, b_qk = _attend_range(
        b_acc, state, b_qk, b_q, q_pos, keys, first_tile, full_tile, cols.full_stop // BLOCK_N, scoring, mask,
        False, SAVE_STATS, AHEAD, sizes,
    )  # fmt: skip
    if HAS_LEFT:
        b_acc, state, b_qk = _attend_range(
            b_acc, state, b_qk, b_q, q_pos, keys, first_tile, first_tile, tl.minimum(full_tile, end), scoring, mask,
            True, SAVE_STATS, AHEAD, sizes,
        )  # fmt: skip
    at = n * stride_lseb + head * tokens_q + first + tl.arange(0, BLOCK_M)
    out = head_rows(out_ptr, stride_ob, stride_oh, stride_ot, n, head, first)
    results = Results(lse_ptr if SAVE_LSE else None, entropy_ptr if SAVE_STATS else None,
                      max_logit_ptr if SAVE_STATS else None)  # fmt: skip
    m_rows, p_out = rows < seqlen_q, out.ptr + tl.arange(0, BLOCK_M)[:, None] * out.stride
    finish_rows(b_acc, state, m_rows, head, p_out, at, results, sinks_ptr if HAS_SINKS else None, DV, BLOCK_DV)
