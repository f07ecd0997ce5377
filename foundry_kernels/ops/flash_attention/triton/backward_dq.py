"""The backward kernel for dq: a program owns a tile of queries. Probabilities are recomputed as in `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import dot, round_to
from foundry_kernels.ops.flash_attention.triton.block_range import block_range
from foundry_kernels.ops.flash_attention.triton.bundles import Bits, Dense, Mask, Pairs, Saved, Sizes
from foundry_kernels.ops.flash_attention.triton.dense import add_bias, fixed_part, hide_by_dense
from foundry_kernels.ops.flash_attention.triton.dropout import kept, load_dropout
from foundry_kernels.ops.flash_attention.triton.mask import seen_keys
from foundry_kernels.ops.flash_attention.triton.order import program_order
from foundry_kernels.ops.flash_attention.triton.scores import (
    changed_gradient,
    load_scoring,
    modifier_of,
    of_head,
    product_gradient,
    score_factor,
    scores,
)
from foundry_kernels.ops.flash_attention.triton.seqlen_info import seqlen_info
from foundry_kernels.ops.flash_attention.triton.softmax import powers
from foundry_kernels.ops.flash_attention.triton.tile_io import head_keys, head_rows, load_rows, rows_from, store_rows
from foundry_kernels.ops.flash_attention.triton.tiles import bits_of_rows, list_of, tile_at


@triton.jit
def _accumulate_dq(
    b_dq, b_q, b_dout, saved, i0, q_pos, keys, order, begin, end, scoring, mask, pairs, dense, modifier,
    HAS: tl.constexpr, MODIFY: tl.constexpr, MASKED: tl.constexpr, sizes,
):  # fmt: skip
    """Adds the keys begin .. end - 1, or the keys of the tiles at these places of the list `order`."""
    factor = score_factor(scoring, HAS)
    STEP: tl.constexpr = sizes.BLOCK_N if order is None else 1
    for at in range(begin, end, STEP):
        j0 = at if order is None else tile_at(order, at) * sizes.BLOCK_N
        j0 = tl.multiple_of(j0, sizes.BLOCK_N)
        first = tl.cast(j0, tl.int64)  # see `_accumulate_dkdv`
        cols = j0 + tl.arange(0, sizes.BLOCK_N)[None, :]  # [1, N]
        b_k = load_rows(rows_from(keys.k, first), keys.seqlen - j0, sizes.BLOCK_N, sizes.BLOCK_D, sizes.D, MASKED)
        b_v = load_rows(rows_from(keys.v, first), keys.seqlen - j0, sizes.BLOCK_N, sizes.BLOCK_DV, sizes.DV, MASKED)
        b_s, b_t = scores(dot(b_q, tl.trans(b_k)), cols - q_pos, scoring, HAS)
        places = tl.arange(0, sizes.BLOCK_N)[None, :]
        if HAS.bias:
            b_s = add_bias(b_s, dense, j0, places, keys.seqlen, MASKED)
        if HAS.modified:
            b_s, b_slope = MODIFY(b_s, cols, modifier)
        b_z = powers(b_s, factor, saved.lse_high, HAS.natural)
        if saved.lse_low is not None:
            b_z -= saved.lse_low
        if HAS.mask:
            b_z = hide_by_dense(b_z, dense, j0, places, keys.seqlen, MASKED)
        if MASKED:
            m_seen = seen_keys(j0, sizes.BLOCK_N, q_pos, keys.seqlen, mask)
            if pairs.bits is not None:
                m_seen = m_seen & bits_of_rows(pairs.bits, j0, sizes.BLOCK_N)
            b_z = tl.where(m_seen, b_z, -float("inf"))
        b_p, b_dp = tl.exp2(b_z), dot(b_dout, tl.trans(b_v))
        if pairs.dropout is not None:
            rows = tl.arange(0, sizes.BLOCK_M)[:, None]
            b_dp = tl.where(kept(pairs.dropout, i0, rows, j0, places, sizes), b_dp * pairs.dropout.scale, 0.0)
        b_ds = b_p * (b_dp - saved.delta)
        if HAS.modified:
            b_ds = changed_gradient(b_ds, b_slope)
        b_ds = product_gradient(b_ds, b_t, HAS)
        b_dq = dot(round_to(b_ds, b_k.dtype), b_k, b_dq)
    return b_dq


@triton.jit(do_not_specialize=["section", "threshold"])
def flash_attention_dq_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_high_ptr, lse_low_ptr, delta_ptr, dq_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr,
    attn_mask_ptr, mask_tiles_ptr, mask_bits_ptr, dropout_seed_ptr, dropout_heads_ptr, lists_ptr, score_pointers,
    n_batch, n_heads, group, section, tokens_q, tokens_k,
    q_strides, k_strides, v_strides,
    do_strides, dq_strides,
    stride_lseb, score, natural_scale, window, mask_strides, tile_strides, list_strides, threshold, keep_scale,
    score_layout, PREPARE: tl.constexpr, MODIFY: tl.constexpr, HAS: tl.constexpr, VARLEN: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, PTX: tl.constexpr, LSE_LOW: tl.constexpr,
    COMPUTE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs are ordered as in the forward kernel."""
    scoring = load_scoring(score, COMPUTE)
    mask = Mask(window.left if HAS.left else None, window.right if HAS.right else None)
    sizes: tl.constexpr = Sizes(D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PTX)
    n, head, tile, tiles = program_order(n_batch, n_heads, section)
    if HAS.right:
        tile = tiles - 1 - tile
    start_q, seqlen_q, start_k, seqlen_k = seqlen_info(
        n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN
    )
    i0 = tile * BLOCK_M
    if i0 >= seqlen_q:
        return
    first = tl.cast(start_q, tl.int64) + i0
    rows = (i0 + tl.arange(0, BLOCK_M))[:, None]  # [M, 1]
    m_rows = rows < seqlen_q
    offset = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    q_pos = rows + offset
    q = head_rows(q_ptr, q_strides, n, head, first)
    b_q = load_rows(q, seqlen_q - i0, BLOCK_M, BLOCK_D, D, True)
    dout = head_rows(dout_ptr, do_strides, n, head, first)
    b_dout = load_rows(dout, seqlen_q - i0, BLOCK_M, BLOCK_DV, DV, True)
    keys = head_keys(k_ptr, v_ptr, k_strides, v_strides, n, head, group, start_k, seqlen_k)
    at = n * stride_lseb + head * tokens_q + start_q + rows
    b_lse = tl.load(lse_high_ptr + at, mask=m_rows, other=float("inf"))
    b_low = tl.load(lse_low_ptr + at, mask=m_rows, other=0.0) if LSE_LOW else None
    saved = Saved(b_lse, b_low, tl.load(delta_ptr + at, mask=m_rows, other=0.0))
    dense = Dense(
        fixed_part(attn_mask_ptr, mask_strides.b, mask_strides.h, mask_strides.t, n, head, rows, seqlen_q,
                   HAS.queries_differ),
        None, mask_strides.s if HAS.keys_differ else None,
    ) if HAS.bias or HAS.mask else None  # fmt: skip
    scoring = of_head(scoring, score, alibi_slopes_ptr, n, head, HAS)
    bits = Bits(
        fixed_part(mask_tiles_ptr, tile_strides.b, tile_strides.h, tile_strides.t, n, head, rows // 64,
                   tl.cdiv(seqlen_q, 64), True),
        mask_bits_ptr + rows % 64, tile_strides.s,
    ) if HAS.tiles else None  # fmt: skip
    dropout = load_dropout(
        dropout_seed_ptr, dropout_heads_ptr, n, head, n_heads, threshold, keep_scale, HAS.dropout_heads, COMPUTE
    ) if HAS.dropout else None  # fmt: skip
    pairs = Pairs(bits, dropout)
    modifier = modifier_of(
        n, head, rows, dropout_heads_ptr, n_heads, score_pointers, score_layout, HAS, PREPARE, COMPUTE
    ) if HAS.modified else None  # fmt: skip
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], COMPUTE)
    if HAS.tiles:
        p_list = list_of(lists_ptr, list_strides.b, list_strides.h, list_strides.r, n, head, tile)
        order, full_start, full_stop, stop = p_list + 2, 0, tl.load(p_list), tl.load(p_list + 1)
    else:
        cols = block_range(i0, seqlen_q, seqlen_k, offset, mask, BLOCK_M, BLOCK_N)
        order, full_start, full_stop, stop = None, cols.full_start, cols.full_stop, cols.stop
    if HAS.left and not HAS.tiles:
        b_dq = _accumulate_dq(
            b_dq, b_q, b_dout, saved, i0, q_pos, keys, order, cols.start, tl.minimum(full_start, stop), scoring, mask,
            pairs, dense, modifier, HAS, MODIFY, True, sizes,
        )  # fmt: skip
    b_dq = _accumulate_dq(
        b_dq,
        b_q,
        b_dout,
        saved,
        i0,
        q_pos,
        keys,
        order,
        full_start,
        full_stop,
        scoring,
        mask,
        pairs,
        dense,
        modifier,
        HAS,
        MODIFY,
        False,
        sizes,
    )
    start = tl.maximum(full_start, full_stop)
    b_dq = _accumulate_dq(
        b_dq, b_q, b_dout, saved, i0, q_pos, keys, order, start, stop, scoring, mask, pairs, dense, modifier, HAS,
        MODIFY, True, sizes,
    )  # fmt: skip
    b_dq = round_to(b_dq * natural_scale, dq_ptr.dtype.element_ty)
    dq = head_rows(dq_ptr, dq_strides, n, head, first)
    store_rows(dq, seqlen_q - i0, b_dq, BLOCK_M, BLOCK_D, D)
