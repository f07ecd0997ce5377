"""The forward kernels for few queries: one tile has all query heads of a group, so that keys are read once, and the
keys are split over programs.

In `decode`, a program owns a split of the keys of one key-value head. If there are several splits, it writes its sums
and its softmax state to memory. With few rows, the last program of a head to finish adds the splits (`_add_splits`).
This needs only one launch, and the result does not depend on which program is last, since the splits are added in
order. With more rows, a second kernel adds them: in `combine`, a program owns a row.
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
    Results,
    Rows,
    Sizes,
    State,
)
from foundry_kernels.ops.flash_attention.triton.dense import add_bias, fixed_part, hide_by_dense
from foundry_kernels.ops.flash_attention.triton.dropout import kept, load_dropout
from foundry_kernels.ops.flash_attention.triton.finish import finish_rows
from foundry_kernels.ops.flash_attention.triton.mask import seen_keys
from foundry_kernels.ops.flash_attention.triton.pages import load_from_pages
from foundry_kernels.ops.flash_attention.triton.scores import load_scoring, modifier_of, of_head, score_factor, scores
from foundry_kernels.ops.flash_attention.triton.seqlen_info import seqlen_info
from foundry_kernels.ops.flash_attention.triton.softmax import fall, online_softmax
from foundry_kernels.ops.flash_attention.triton.tile_io import head_keys, load_rows, rows_from
from foundry_kernels.ops.flash_attention.triton.tiles import bits_of_rows

#: The most splits of a sequence. All their states are read at once.
MAX_SPLITS = tl.constexpr(64)


@triton.jit
def _splits(n, start_k, seqlen_k, split_keys, num_splits, VARLEN: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """(the number of splits of sequence n, the place of the first one in the workspace). The splits of the packed
    sequences before n are at most start_k // split_keys + n, so n begins there. For pages, the host does not know the
    number of keys."""
    used = tl.minimum(tl.cdiv(seqlen_k, split_keys), num_splits)
    first = start_k // split_keys + n if VARLEN and not PAGE_SIZE else n * num_splits
    return used, first


@triton.jit
def _add_splits(
    sums_ptr, states_ptr, at, m_rows, step, n_states, used,
    COMPUTE: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_STATS: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr,
):  # fmt: skip
    """(the sums [ROWS, DV], the state) of a softmax over all keys. The rows' first splits are at the places `at`
    [ROWS], the next ones `step` further each. BLOCK_SPLITS are added at a time, in a fixed order."""
    splits = tl.arange(0, MAX_SPLITS)[:, None]  # [splits, 1]
    m_states = (splits < used) & m_rows[None, :]
    p_states = states_ptr + at[None, :] + splits * step  # [splits, rows]
    b_tops = tl.load(p_states, mask=m_states, other=-float("inf"))
    b_m = tl.max(b_tops, 0)
    b_base = tl.where(b_m == -float("inf"), 0.0, b_m)[None, :]
    b_fall = fall(b_tops, b_base, HAS_BIAS)
    b_shrink = tl.exp2(b_fall)
    b_sizes = tl.load(p_states + n_states, mask=m_states, other=0.0)
    b_l = tl.sum(b_sizes * b_shrink, 0)
    b_e = tl.zeros([ROWS], COMPUTE)
    if SAVE_STATS:  # a weight of 0 must not meet -inf
        b_falls = tl.load(p_states + 2 * n_states, mask=m_states, other=0.0)
        b_e = tl.sum(b_shrink * (b_falls + tl.maximum(b_fall, -2000.0) * b_sizes), 0)
    b_acc = tl.zeros([ROWS, BLOCK_DV], COMPUTE)
    dims = tl.arange(0, BLOCK_DV)[None, None, :]
    for first in range(0, used, BLOCK_SPLITS):
        each = (first + tl.arange(0, BLOCK_SPLITS))[:, None]
        o_each = at[None, :] + each * step
        m_each = (each < used) & m_rows[None, :]
        b_each = tl.load(states_ptr + o_each, mask=m_each, other=-float("inf"))
        m_sums = m_each[:, :, None] & (dims < DV)
        b_sums = tl.load(sums_ptr + (o_each * DV)[:, :, None] + dims, mask=m_sums, other=0.0)
        b_acc += tl.sum(b_sums * tl.exp2(fall(b_each, b_base, HAS_BIAS))[:, :, None], 0)
    return b_acc, State(b_m, b_l, b_e)


@triton.jit(do_not_specialize=["num_splits", "threshold"])
def flash_attention_decode_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, entropy_ptr, max_logit_ptr, sums_ptr, states_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr, sinks_ptr,
    attn_mask_ptr, mask_tiles_ptr, mask_bits_ptr, dropout_seed_ptr, dropout_heads_ptr,
    block_table_ptr, leftpad_k_ptr, arrived_ptr, score_pointers,
    n_batch, n_kv_heads, group, n_rows, tokens_q, tokens_k, split_keys, num_splits, n_states,
    q_strides, k_strides, v_strides, o_strides, stride_lseb,
    score, window, mask_strides, tile_strides, threshold, keep_scale, stride_table, n_pages, score_layout,
    PREPARE: tl.constexpr, MODIFY: tl.constexpr, HAS: tl.constexpr, VARLEN: tl.constexpr, BOTTOM_RIGHT: tl.constexpr,
    HAS_SINKS: tl.constexpr, PTX: tl.constexpr,
    SAVE_LSE: tl.constexpr, SAVE_STATS: tl.constexpr, SPLIT: tl.constexpr, COMPUTE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_SPLITS: tl.constexpr, Q_AHEAD: tl.constexpr,
):  # fmt: skip
    """A row is a query of one of the heads of a group; there are `n_rows` <= BLOCK_M, and heads vary fastest. With
    SPLIT, a program writes the sums [splits, Hk, n_rows, DV] and the states, three times `n_states` numbers; otherwise
    it writes the results. With BLOCK_SPLITS, the last program of a head then computes the results. `arrived` counts the
    programs of each head; it is zero before the launch, and the last program resets it. ROWS is a power of two, at
    least n_rows. All tiles are masked, because the time goes into reading keys."""
    scoring = load_scoring(score, COMPUTE)
    mask = Mask(window.left if HAS.left else None, window.right if HAS.right else None)
    sizes: tl.constexpr = Sizes(D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PTX)
    pid = tl.program_id(0)
    kv_head = (pid % n_kv_heads).to(tl.int64)
    n = (pid // n_kv_heads % n_batch).to(tl.int64)
    split = pid // n_kv_heads // n_batch
    start_q, seqlen_q, start_k, seqlen_k = seqlen_info(
        n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN, leftpad_k_ptr, PAGE_SIZE
    )
    used, place = _splits(n, start_k, seqlen_k, split_keys, num_splits, VARLEN, PAGE_SIZE)
    if split >= tl.maximum(used, 1):
        return
    rows = tl.arange(0, BLOCK_M)  # [M]
    tokens = rows // group
    heads = kv_head * group + rows % group
    m_rows = tokens < seqlen_q
    offset = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    q_pos = (tokens + offset)[:, None]
    p_q = q_ptr + n * q_strides.b + (tl.cast(start_q, tl.int64) + tokens) * q_strides.t + heads * q_strides.h
    dims = tl.arange(0, BLOCK_D)[None, :]
    m_q = m_rows[:, None] & (dims < D)
    if not Q_AHEAD:
        b_q = tl.load(p_q[:, None] + dims, mask=m_q, other=0.0)  # [M, D]
    if PAGE_SIZE:
        k, v = Rows(k_ptr + kv_head * k_strides.h, k_strides.t), Rows(v_ptr + kv_head * v_strides.h, v_strides.t)
        keys = Keys(k, v, seqlen_k)
        pages = Pages(block_table_ptr + n * stride_table, start_k, n_pages - 1, k_strides.b, v_strides.b)
    else:
        keys = head_keys(k_ptr, v_ptr, k_strides, v_strides, n, kv_head, 1, start_k, seqlen_k)
    dense = Dense(
        fixed_part(attn_mask_ptr, mask_strides.b, mask_strides.h, mask_strides.t, n, heads[:, None], tokens[:, None],
                   seqlen_q, HAS.queries_differ),
        None, mask_strides.s if HAS.keys_differ else None,
    ) if HAS.bias or HAS.mask else None  # fmt: skip
    scoring = of_head(scoring, score, alibi_slopes_ptr, n, heads[:, None], HAS)
    modifier = modifier_of(
        n, heads[:, None], tokens[:, None], dropout_heads_ptr, n_kv_heads * group, score_pointers, score_layout, HAS,
        PREPARE, COMPUTE,
    ) if HAS.modified else None  # fmt: skip
    bits = Bits(
        fixed_part(mask_tiles_ptr, tile_strides.b, tile_strides.h, tile_strides.t, n, heads[:, None],
                   tokens[:, None] // 64, tl.cdiv(seqlen_q, 64), True),
        mask_bits_ptr + tokens[:, None] % 64, tile_strides.s,
    ) if HAS.tiles else None  # fmt: skip
    dropout = load_dropout(
        dropout_seed_ptr, dropout_heads_ptr, n, heads[:, None], n_kv_heads * group, threshold, keep_scale,
        HAS.dropout_heads, COMPUTE,
    ) if HAS.dropout else None  # fmt: skip
    factor = score_factor(scoring, HAS)
    b_acc = tl.zeros([BLOCK_M, BLOCK_DV], COMPUTE)
    b_m = tl.full([BLOCK_M], -float("inf"), COMPUTE)
    state = State(b_m, tl.zeros([BLOCK_M], COMPUTE), tl.zeros([BLOCK_M], COMPUTE))
    begin, _, _, end = block_range(0, seqlen_q, seqlen_k, offset, mask, BLOCK_M, BLOCK_N)
    if SPLIT:
        begin += split * split_keys
        if split < num_splits - 1:  # the last one takes the rest
            end = tl.minimum(end, begin + split_keys)
    for j0 in range(begin, end, BLOCK_N):
        j0 = tl.multiple_of(j0, BLOCK_N)
        if Q_AHEAD:
            # The queries are copied with the keys: a load to registers before the loop would delay the copies of keys.
            # The address depends on the round, or the compiler would move the load out of the loop.
            same_q = p_q + tl.where(j0 < begin, q_strides.t, 0)
            b_q = tl.load(same_q[:, None] + dims, mask=m_q, other=0.0)
        if PAGE_SIZE:
            b_k = load_from_pages(keys.k, pages, pages.stride_k, j0, seqlen_k, BLOCK_N, BLOCK_D, D, True, PAGE_SIZE)
            b_v = load_from_pages(keys.v, pages, pages.stride_v, j0, seqlen_k, BLOCK_N, BLOCK_DV, DV, True, PAGE_SIZE)
        else:
            b_k = load_rows(rows_from(keys.k, j0), seqlen_k - j0, BLOCK_N, BLOCK_D, D, True)  # [N, D]
            b_v = load_rows(rows_from(keys.v, j0), seqlen_k - j0, BLOCK_N, BLOCK_DV, DV, True)  # [N, DV]
        places = tl.arange(0, BLOCK_N)[None, :]
        b_s, _b_t = scores(dot(b_q, tl.trans(b_k)), j0 + places - q_pos, scoring, HAS)  # [M, N]
        if HAS.bias:
            b_s = add_bias(b_s, dense, j0, places, seqlen_k, True)
        if HAS.modified:
            b_s = MODIFY(b_s, j0 + places, modifier)
        if HAS.mask:
            b_s = hide_by_dense(b_s, dense, j0, places, seqlen_k, True)
        if HAS.tiles:
            b_s = tl.where(bits_of_rows(bits, j0, BLOCK_N), b_s, -float("inf"))
        b_s = tl.where(seen_keys(j0, BLOCK_N, q_pos, seqlen_k, mask), b_s, -float("inf"))
        b_p, b_shrink, state = online_softmax(b_s, factor, state, True, HAS.natural, SAVE_STATS)
        if dropout is not None:
            b_p = tl.where(kept(dropout, 0, tokens[:, None], j0, places, sizes), b_p, dropout.zero)
        b_acc = dot(round_to(b_p, b_v.dtype), b_v, b_acc * b_shrink[:, None])
    if dropout is not None:
        b_acc = b_acc * dropout.scale
    if SPLIT:
        at = ((place + split) * n_kv_heads + kv_head) * n_rows + rows
        m_rows = rows < n_rows
        tl.store(states_ptr + at, state.m, mask=m_rows)
        tl.store(states_ptr + n_states + at, state.l, mask=m_rows)
        if SAVE_STATS:
            tl.store(states_ptr + 2 * n_states + at, state.e, mask=m_rows)
        dims_v = tl.arange(0, BLOCK_DV)[None, :]
        tl.store(sums_ptr + at[:, None] * DV + dims_v, b_acc, mask=m_rows[:, None] & (dims_v < DV))
    if BLOCK_SPLITS:
        tl.debug_barrier()  # all threads write their sums before the program counts itself
        p_arrived = arrived_ptr + n * n_kv_heads + kv_head
        if tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu") < tl.maximum(used, 1) - 1:
            return
        tl.store(p_arrived, 0)  # for the next launch
        rows = tl.arange(0, ROWS)
        tokens = rows // group
        heads = kv_head * group + rows % group
        m_rows = (tokens < seqlen_q) & (rows < n_rows)
        b_acc, state = _add_splits(
            sums_ptr, states_ptr, (place * n_kv_heads + kv_head) * n_rows + rows, m_rows,
            tl.cast(n_kv_heads, tl.int64) * n_rows, n_states, used, COMPUTE, HAS.natural, SAVE_STATS, DV,
            BLOCK_DV, ROWS, BLOCK_SPLITS,
        )  # fmt: skip
    if BLOCK_SPLITS or not SPLIT:
        tokens += start_q
        p_out = out_ptr + n * o_strides.b + tokens.to(tl.int64) * o_strides.t + heads * o_strides.h
        at = n * stride_lseb + heads * tokens_q + tokens
        results = Results(lse_ptr if SAVE_LSE else None, entropy_ptr if SAVE_STATS else None,
                          max_logit_ptr if SAVE_STATS else None)  # fmt: skip
        sinks_ptr = sinks_ptr if HAS_SINKS else None
        finish_rows(b_acc, state, m_rows, heads, p_out[:, None], at, results, sinks_ptr, HAS.natural, DV, BLOCK_DV)


@triton.jit(do_not_specialize=["num_splits"])
def flash_attention_combine_kernel(
    sums_ptr, states_ptr, out_ptr, lse_ptr, entropy_ptr, max_logit_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, sinks_ptr,
    leftpad_k_ptr, n_batch, n_kv_heads, group, n_rows, tokens_q, tokens_k, split_keys, num_splits, n_states,
    o_strides, stride_lseb,
    VARLEN: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_BIAS: tl.constexpr, SAVE_LSE: tl.constexpr,
    SAVE_STATS: tl.constexpr, COMPUTE: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Computes the results of one row from its splits."""
    pid = tl.program_id(0)
    row = pid % n_rows
    kv_head = (pid // n_rows % n_kv_heads).to(tl.int64)
    n = (pid // n_rows // n_kv_heads).to(tl.int64)
    start_q, seqlen_q, start_k, seqlen_k = seqlen_info(
        n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN, leftpad_k_ptr, PAGE_SIZE
    )
    token = row // group
    if token >= seqlen_q:
        return
    used, place = _splits(n, start_k, seqlen_k, split_keys, num_splits, VARLEN, PAGE_SIZE)
    row_at = tl.arange(0, 1) + (place * n_kv_heads + kv_head) * n_rows + row  # [1]
    b_acc, state = _add_splits(
        sums_ptr, states_ptr, row_at, row_at >= 0, tl.cast(n_kv_heads, tl.int64) * n_rows, n_states, used, COMPUTE,
        HAS_BIAS, SAVE_STATS, DV, BLOCK_DV, 1, BLOCK_SPLITS,
    )  # fmt: skip
    token += start_q
    head = kv_head * group + row % group + tl.zeros([1], tl.int64)  # [1]
    p_out = out_ptr + n * o_strides.b + tl.cast(token, tl.int64) * o_strides.t + head * o_strides.h
    results = Results(lse_ptr if SAVE_LSE else None, entropy_ptr if SAVE_STATS else None,
                      max_logit_ptr if SAVE_STATS else None)  # fmt: skip
    sinks_ptr = sinks_ptr if HAS_SINKS else None
    finish_rows(
        b_acc, state, head >= 0, head, p_out[:, None], n * stride_lseb + head * tokens_q + token,
        results, sinks_ptr, HAS_BIAS, DV, BLOCK_DV,
    )  # fmt: skip
