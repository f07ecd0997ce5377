"""The forward kernel: a program owns a tile of queries of one head and visits the keys once, with a running softmax.

The loop bounds skip keys outside of the window. Tiles are visited from the right. The tiles on the window's right edge
come first and are masked. Tiles between its edges are not masked and need no bounds checks. Names begin with b_ for a
block of values and with m_ for a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import dot, round_to
from foundry_kernels.ops.flash_attention.triton.block_range import block_range
from foundry_kernels.ops.flash_attention.triton.bundles import (
    Bits,
    Dense,
    Keys,
    Mask,
    Pages,
    Pairs,
    Results,
    Rows,
    Sizes,
    State,
)
from foundry_kernels.ops.flash_attention.triton.dense import add_bias, fixed_part, hide_by_dense
from foundry_kernels.ops.flash_attention.triton.dropout import kept, load_dropout
from foundry_kernels.ops.flash_attention.triton.finish import finish_rows
from foundry_kernels.ops.flash_attention.triton.mask import seen_keys
from foundry_kernels.ops.flash_attention.triton.order import program_order
from foundry_kernels.ops.flash_attention.triton.pages import load_from_pages, offsets_in_pages
from foundry_kernels.ops.flash_attention.triton.scores import load_scoring, modifier_of, of_head, score_factor, scores
from foundry_kernels.ops.flash_attention.triton.seqlen_info import seqlen_info
from foundry_kernels.ops.flash_attention.triton.softmax import online_softmax
from foundry_kernels.ops.flash_attention.triton.tile_io import head_keys, head_rows, load_rows, rows_from
from foundry_kernels.ops.flash_attention.triton.tiles import bits_of_rows, list_of, tile_at


@triton.jit
def _products(b_q, keys, pages, tile, m_keys, CHECK: tl.constexpr, sizes, PAGE_SIZE: tl.constexpr):
    """The matmul [M, N] of the queries with one tile of keys. With CHECK, only `m_keys` are read, [N, 1] or [1, 1]:
    Triton 3.9's interpreter does not accept a comparison of two scalars as a mask."""
    k = keys.k
    if PAGE_SIZE:
        dims = tl.arange(0, sizes.BLOCK_D)[None, :]
        p_k = k.ptr + offsets_in_pages(
            pages, pages.stride_k, k.stride, tile * sizes.BLOCK_N, keys.seqlen, sizes.BLOCK_N, PAGE_SIZE
        ) + dims  # fmt: skip
    else:
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
    b_acc, state, b_qk, b_q, i0, q_pos, keys, order, first_tile, begin, end, scoring, mask, pairs, dense, modifier,
    pages, HAS: tl.constexpr, MODIFY: tl.constexpr, MASKED: tl.constexpr, SAVE_STATS: tl.constexpr,
    AHEAD: tl.constexpr, sizes, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Attends to the key tiles end - 1, .., begin, or to the tiles at these places of the list `order`. q_pos [M, 1] is
    the position of each query among the keys, i0 the first query.

    AHEAD: b_qk are the scores with the keys of tile end - 1, and the returned scores are those of tile begin - 1. The
    matmul of each tile starts before the softmax of the tile to its right, and overlaps with it if matmuls are
    asynchronous. Scores beyond `first_tile` are not used. This takes the registers of one more tile of scores.
    """
    factor = score_factor(scoring, HAS)
    rows = tl.arange(0, sizes.BLOCK_M)[:, None]
    for tile in range(end - 1, begin - 1, -1):
        j0 = tl.multiple_of(tile_at(order, tile) * sizes.BLOCK_N, sizes.BLOCK_N)
        if AHEAD:  # the next tile needs no mask; without a next tile, nothing is loaded, or this tile again if unmasked
            b_now, following = b_qk, tl.maximum(tile - 1, first_tile)
            some = tl.zeros([1, 1], tl.int32) + following < tile
            b_qk = _products(b_q, keys, pages, tile_at(order, following), some, MASKED, sizes, PAGE_SIZE)
        else:
            m_keys = tl.arange(0, sizes.BLOCK_N)[:, None] < keys.seqlen - j0
            b_now = _products(b_q, keys, pages, tile_at(order, tile), m_keys, MASKED, sizes, PAGE_SIZE)
        places = tl.arange(0, sizes.BLOCK_N)[None, :]
        b_s, _b_t = scores(b_now, j0 + places - q_pos, scoring, HAS)
        if HAS.bias:
            b_s = add_bias(b_s, dense, j0, places, keys.seqlen, MASKED)
        if HAS.modified:
            b_s = MODIFY(b_s, j0 + places, modifier)
        if HAS.mask:
            b_s = hide_by_dense(b_s, dense, j0, places, keys.seqlen, MASKED)
        if MASKED:
            m_seen = seen_keys(j0, sizes.BLOCK_N, q_pos, keys.seqlen, mask)
            if pairs.bits is not None:
                m_seen = m_seen & bits_of_rows(pairs.bits, j0, sizes.BLOCK_N)
            b_s = tl.where(m_seen, b_s, -float("inf"))
        SOME_EMPTY: tl.constexpr = MASKED or HAS.natural or HAS.mask
        b_p, b_shrink, state = online_softmax(b_s, factor, state, SOME_EMPTY, HAS.natural, SAVE_STATS)
        if pairs.dropout is not None:
            b_p = tl.where(kept(pairs.dropout, i0, rows, j0, places, sizes), b_p, pairs.dropout.zero)
        if PAGE_SIZE:
            b_v = load_from_pages(
                keys.v, pages, pages.stride_v, j0, keys.seqlen, sizes.BLOCK_N, sizes.BLOCK_DV, sizes.DV, MASKED,
                PAGE_SIZE,
            )  # fmt: skip
        else:
            b_v = load_rows(rows_from(keys.v, j0), keys.seqlen - j0, sizes.BLOCK_N, sizes.BLOCK_DV, sizes.DV, MASKED)
        b_acc = dot(round_to(b_p, b_v.dtype), b_v, b_acc * b_shrink[:, None])
    return b_acc, state, b_qk


@triton.jit(do_not_specialize=["section", "threshold"])
def flash_attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, entropy_ptr, max_logit_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr, sinks_ptr,
    attn_mask_ptr, mask_tiles_ptr, mask_bits_ptr, dropout_seed_ptr, dropout_heads_ptr, lists_ptr,
    block_table_ptr, leftpad_k_ptr, score_pointers,
    n_batch, n_heads, group, section, tokens_q, tokens_k,
    q_strides, k_strides, v_strides, o_strides, stride_lseb,
    score, window, mask_strides, tile_strides, list_strides, threshold, keep_scale, stride_table, n_pages, score_layout,
    PREPARE: tl.constexpr, MODIFY: tl.constexpr, HAS: tl.constexpr, VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    HAS_SINKS: tl.constexpr, PTX: tl.constexpr,
    SAVE_LSE: tl.constexpr, SAVE_STATS: tl.constexpr, COMPUTE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    AHEAD: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Under a causal mask the last tiles have the most work, so they come first in their section. `stride_lseb` is the
    batch stride of lse, entropy and max_logit. `score` is a `Score`, `HAS` a `Has` (see `kernel_options`), and `mask`
    a `Mask`."""
    scoring = load_scoring(score, COMPUTE)
    mask = Mask(window.left if HAS.left else None, window.right if HAS.right else None)
    sizes: tl.constexpr = Sizes(D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PTX)
    n, head, tile, tiles = program_order(n_batch, n_heads, section)
    if HAS.right:
        tile = tiles - 1 - tile
    start_q, seqlen_q, start_k, seqlen_k = seqlen_info(
        n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN, leftpad_k_ptr, PAGE_SIZE
    )
    i0 = tile * BLOCK_M
    if i0 >= seqlen_q:
        return
    first = tl.cast(start_q, tl.int64) + i0
    rows = i0 + tl.arange(0, BLOCK_M)  # [M]
    offset = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    q_pos = (rows + offset)[:, None]
    q = head_rows(q_ptr, q_strides, n, head, first)
    b_q = load_rows(q, seqlen_q - i0, BLOCK_M, BLOCK_D, D, True)
    if PAGE_SIZE:
        kv_head = head // group
        k, v = Rows(k_ptr + kv_head * k_strides.h, k_strides.t), Rows(v_ptr + kv_head * v_strides.h, v_strides.t)
        keys = Keys(k, v, seqlen_k)
        pages = Pages(block_table_ptr + n * stride_table, start_k, n_pages - 1, k_strides.b, v_strides.b)
    else:
        keys = head_keys(k_ptr, v_ptr, k_strides, v_strides, n, head, group, start_k, seqlen_k)
        pages = None
    dense = Dense(
        fixed_part(attn_mask_ptr, mask_strides.b, mask_strides.h, mask_strides.t, n, head, rows[:, None], seqlen_q,
                   HAS.queries_differ),
        None, mask_strides.s if HAS.keys_differ else None,
    ) if HAS.bias or HAS.mask else None  # fmt: skip
    scoring = of_head(scoring, score, alibi_slopes_ptr, n, head, HAS)
    modifier = modifier_of(
        n, head, rows[:, None], dropout_heads_ptr, n_heads, score_pointers, score_layout, HAS, PREPARE, COMPUTE
    ) if HAS.modified else None  # fmt: skip
    bits = Bits(
        fixed_part(mask_tiles_ptr, tile_strides.b, tile_strides.h, tile_strides.t, n, head, rows[:, None] // 64,
                   tl.cdiv(seqlen_q, 64), True),
        mask_bits_ptr + rows[:, None] % 64, tile_strides.s,
    ) if HAS.tiles else None  # fmt: skip
    dropout = load_dropout(
        dropout_seed_ptr, dropout_heads_ptr, n, head, n_heads, threshold, keep_scale, HAS.dropout_heads, COMPUTE
    ) if HAS.dropout else None  # fmt: skip
    pairs = Pairs(bits, dropout)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], COMPUTE)
    b_m = tl.full([BLOCK_M], -float("inf"), COMPUTE)
    state = State(b_m, tl.zeros([BLOCK_M], COMPUTE), tl.zeros([BLOCK_M], COMPUTE))
    if HAS.tiles:
        p_list = list_of(lists_ptr, list_strides.b, list_strides.h, list_strides.r, n, head, tile)
        order, first_tile, full_tile = p_list + 2, 0, 0
        full_stop, end = tl.load(p_list), tl.load(p_list + 1)
        masked_tile = full_stop
    else:
        cols = block_range(i0, seqlen_q, seqlen_k, offset, mask, BLOCK_M, BLOCK_N)
        order = None
        first_tile, full_tile, end = cols.start // BLOCK_N, cols.full_start // BLOCK_N, tl.cdiv(cols.stop, BLOCK_N)
        full_stop = cols.full_stop // BLOCK_N
        masked_tile = tl.maximum(cols.full_start, cols.full_stop) // BLOCK_N
    b_qk = tl.full([], 0.0, COMPUTE)  # means no scores: Triton 3.6 cannot return None from a function
    if AHEAD:
        last_tile = tile_at(order, tl.maximum(end - 1, 0))
        m_keys = tl.arange(0, BLOCK_N)[:, None] < seqlen_k - last_tile * BLOCK_N
        b_qk = _products(b_q, keys, pages, last_tile, m_keys, True, sizes, PAGE_SIZE)
    b_acc, state, b_qk = _attend_range(
        b_acc, state, b_qk, b_q, i0, q_pos, keys, order, first_tile, masked_tile, end, scoring, mask, pairs, dense,
        modifier, pages, HAS, MODIFY, True, SAVE_STATS, AHEAD, sizes, PAGE_SIZE,
    )  # fmt: skip
    b_acc, state, b_qk = _attend_range(
        b_acc, state, b_qk, b_q, i0, q_pos, keys, order, first_tile, full_tile, full_stop, scoring, mask, pairs, dense,
        modifier, pages, HAS, MODIFY, False, SAVE_STATS, AHEAD, sizes, PAGE_SIZE,
    )  # fmt: skip
    if HAS.left and not HAS.tiles:
        b_acc, state, b_qk = _attend_range(
            b_acc, state, b_qk, b_q, i0, q_pos, keys, order, first_tile, first_tile, tl.minimum(full_tile, end),
            scoring, mask, pairs, dense, modifier, pages, HAS, MODIFY, True, SAVE_STATS, AHEAD, sizes, PAGE_SIZE,
        )  # fmt: skip
    if dropout is not None:
        b_acc = b_acc * dropout.scale
    at = n * stride_lseb + head * tokens_q + first + tl.arange(0, BLOCK_M)
    out = head_rows(out_ptr, o_strides, n, head, first)
    results = Results(lse_ptr if SAVE_LSE else None, entropy_ptr if SAVE_STATS else None,
                      max_logit_ptr if SAVE_STATS else None)  # fmt: skip
    m_rows, p_out = rows < seqlen_q, out.ptr + tl.arange(0, BLOCK_M)[:, None] * out.stride
    sinks_ptr = sinks_ptr if HAS_SINKS else None
    finish_rows(b_acc, state, m_rows, head, p_out, at, results, sinks_ptr, HAS.natural, DV, BLOCK_DV)
