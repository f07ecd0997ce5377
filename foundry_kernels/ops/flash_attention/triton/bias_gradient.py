"""The gradients of a bias and of the tensors that a score function reads.

A program owns a tile of the bias and visits, in a fixed order, all pairs of a query and a key to which the tile was
added. If the bias is broadcast along sequences, heads, queries or keys, it visits all of them. So nothing is stored for
a pair, and the sums are the same in every run. What a score function loads is like a bias of each sequence and head,
which is broadcast along the queries or keys that its indices do not depend on; `score_launch` adds these sums up.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import dot, round_to
from foundry_kernels.ops.flash_attention.triton.block_range import block_range
from foundry_kernels.ops.flash_attention.triton.bundles import Bits, Dense, Mask, Sizes
from foundry_kernels.ops.flash_attention.triton.dense import add_bias, fixed_part, hide_by_dense
from foundry_kernels.ops.flash_attention.triton.dropout import kept, load_dropout
from foundry_kernels.ops.flash_attention.triton.mask import seen_keys
from foundry_kernels.ops.flash_attention.triton.scores import (
    changed_gradient,
    load_scoring,
    modifier_of,
    of_head,
    score_factor,
    scores,
)
from foundry_kernels.ops.flash_attention.triton.seqlen_info import seqlen_info
from foundry_kernels.ops.flash_attention.triton.softmax import powers
from foundry_kernels.ops.flash_attention.triton.tile_io import head_rows, load_rows
from foundry_kernels.ops.flash_attention.triton.tiles import bits_of_rows


@triton.jit(do_not_specialize=["threshold"])
def flash_attention_dbias_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_high_ptr, lse_low_ptr, delta_ptr, dbias_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr,
    attn_mask_ptr, mask_tiles_ptr, mask_bits_ptr, dropout_seed_ptr, dropout_heads_ptr, score_pointers,
    first_unit, width, own_heads, tiles_q, tiles_k, each_n, each_head, each_q, each_k, n_heads, group,
    tokens_q, tokens_k,
    q_strides, k_strides, v_strides,
    do_strides, db_strides,
    stride_lseb, score, window, mask_strides, tile_strides, threshold, keep_scale, score_layout,
    PREPARE: tl.constexpr, MODIFY: tl.constexpr, HAS: tl.constexpr, OWN_Q: tl.constexpr, OWN_K: tl.constexpr,
    VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr, PTX: tl.constexpr, LSE_LOW: tl.constexpr, COMPUTE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The bias has `own_heads` heads, and tiles_q x tiles_k tiles for each head. The program of a tile visits `each_n`
    sequences, `each_head` heads, `each_q` tiles of queries and `each_k` tiles of keys.

    OWN_Q, OWN_K: whether it varies along queries and keys. For a score function, dbias is [units, M or 1, width], with
    a unit for each sequence, head and tile of queries, of which the launch begins at `first_unit`."""
    scoring = load_scoring(score, COMPUTE)
    mask = Mask(window.left if HAS.left else None, window.right if HAS.right else None)
    sizes: tl.constexpr = Sizes(D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PTX)
    pid = tl.program_id(0)
    if first_unit is not None:
        pid += first_unit * tiles_k
    own_j = pid % tiles_k
    own_i = pid // tiles_k % tiles_q
    own_head = pid // tiles_k // tiles_q % own_heads
    own_n = pid // tiles_k // tiles_q // own_heads
    places_q, places = tl.arange(0, BLOCK_M)[:, None], tl.arange(0, BLOCK_N)[None, :]
    start_q, seqlen_q, start_k, seqlen_k = 0, tokens_q, 0, tokens_k
    if VARLEN:
        start_q, seqlen_q, start_k, seqlen_k = seqlen_info(
            own_n.to(tl.int64), cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN
        )
    offset = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    steps = each_n * each_head * each_q * each_k
    if OWN_Q and OWN_K:
        cols = block_range(own_i * BLOCK_M, seqlen_q, seqlen_k, offset, mask, BLOCK_M, BLOCK_N)
        if (own_j * BLOCK_N < cols.start) | (own_j * BLOCK_N >= cols.stop):
            steps = 0  # no query sees these keys
    b_sum = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    for step in range(steps):
        j0 = tl.multiple_of((own_j + step % each_k) * BLOCK_N, BLOCK_N)
        i0 = tl.multiple_of((own_i + step // each_k % each_q) * BLOCK_M, BLOCK_M)
        head = (own_head + step // each_k // each_q % each_head).to(tl.int64)
        n = (own_n + step // each_k // each_q // each_head).to(tl.int64)
        q = head_rows(q_ptr, q_strides, n, head, start_q + i0)
        k = head_rows(k_ptr, k_strides, n, head // group, start_k + j0)
        b_q = load_rows(q, seqlen_q - i0, BLOCK_M, BLOCK_D, D, True)
        b_k = load_rows(k, seqlen_k - j0, BLOCK_N, BLOCK_D, D, True)
        rows = i0 + places_q
        m_rows, q_pos = rows < seqlen_q, rows + offset
        dense = Dense(
            fixed_part(attn_mask_ptr, mask_strides.b, mask_strides.h, mask_strides.t, n, head, rows, seqlen_q,
                       HAS.queries_differ),
            None, mask_strides.s if HAS.keys_differ else None,
        ) if HAS.bias or HAS.mask else None  # fmt: skip
        head_scoring = of_head(scoring, score, alibi_slopes_ptr, n, head, HAS)
        b_s, _b_t = scores(dot(b_q, tl.trans(b_k)), j0 + places - q_pos, head_scoring, HAS)
        if HAS.bias:
            b_s = add_bias(b_s, dense, j0, places, seqlen_k, True)
        if HAS.modified:
            modifier = modifier_of(
                n, head, rows, dropout_heads_ptr, n_heads, score_pointers, score_layout, HAS, PREPARE, COMPUTE
            )  # fmt: skip
            b_s, b_slope = MODIFY(b_s, j0 + places, modifier)
        at = n * stride_lseb + head * tokens_q + start_q + rows
        b_lse = tl.load(lse_high_ptr + at, mask=m_rows, other=float("inf"))
        b_z = powers(b_s, score_factor(head_scoring, HAS), b_lse, True)
        if LSE_LOW:
            b_z -= tl.load(lse_low_ptr + at, mask=m_rows, other=0.0)
        if HAS.mask:
            b_z = hide_by_dense(b_z, dense, j0, places, seqlen_k, True)
        m_seen = m_rows & seen_keys(j0, BLOCK_N, q_pos, seqlen_k, mask)
        if HAS.tiles:
            bits = Bits(
                fixed_part(mask_tiles_ptr, tile_strides.b, tile_strides.h, tile_strides.t, n, head, rows // 64,
                           tl.cdiv(seqlen_q, 64), True),
                mask_bits_ptr + rows % 64, tile_strides.s,
            )  # fmt: skip
            m_seen = m_seen & bits_of_rows(bits, j0, BLOCK_N)
        b_p = tl.exp2(tl.where(m_seen, b_z, -float("inf")))
        dout = head_rows(dout_ptr, do_strides, n, head, start_q + i0)
        v = head_rows(v_ptr, v_strides, n, head // group, start_k + j0)
        b_dout = load_rows(dout, seqlen_q - i0, BLOCK_M, BLOCK_DV, DV, True)
        b_v = load_rows(v, seqlen_k - j0, BLOCK_N, BLOCK_DV, DV, True)
        b_dp = dot(b_dout, tl.trans(b_v))
        if HAS.dropout:
            dropout = load_dropout(dropout_seed_ptr, dropout_heads_ptr, n, head, n_heads, threshold, keep_scale,
                                   HAS.dropout_heads, COMPUTE)  # fmt: skip
            b_dp = tl.where(kept(dropout, i0, places_q, j0, places, sizes), b_dp * dropout.scale, 0.0)
        b_ds = b_p * (b_dp - tl.load(delta_ptr + at, mask=m_rows, other=0.0))
        if HAS.modified:
            b_ds = changed_gradient(b_ds, b_slope)
        b_sum += b_ds
    if not OWN_Q:
        b_sum = tl.sum(b_sum, 0)[None, :]
    if not OWN_K:
        b_sum = tl.sum(b_sum, 1)[:, None]
    keys = own_j * BLOCK_N + places if OWN_K else tl.zeros([1, 1], tl.int32)
    if first_unit is not None:
        row = (pid // tiles_k - first_unit).to(tl.int64) * (BLOCK_M if OWN_Q else 1)
        p_rows = dbias_ptr + (row + (places_q if OWN_Q else tl.zeros([1, 1], tl.int32))) * width
        tl.store(p_rows + keys, b_sum, mask=keys < width)
    else:
        rows = own_i * BLOCK_M + places_q if OWN_Q else tl.zeros([1, 1], tl.int32)
        p_dbias = dbias_ptr + own_n.to(tl.int64) * db_strides.b + own_head.to(tl.int64) * db_strides.h
        p_dbias += rows.to(tl.int64) * db_strides.t + keys.to(tl.int64) * db_strides.s
        tl.store(p_dbias, round_to(b_sum, dbias_ptr.dtype.element_ty), mask=(rows < tokens_q) & (keys < tokens_k))
