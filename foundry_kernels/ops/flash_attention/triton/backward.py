"""The backward kernels. Probabilities are recomputed from the scores and lse; no two programs write to one element.

`preprocess` computes what the other kernels read for each row. In `dkdv`, a program owns a tile of keys of one
key-value head and visits the queries of all heads of its group, so the gradients of shared heads are summed in
registers. If this makes too few programs, each visits only some heads of its group, and `sum_splits` adds their
results. In `dq` (module `backward_dq`), a program owns a tile of queries. On an H100, one kernel with five matmuls,
which adds to dq in memory, was slower than these kernels with seven.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import dot, round_to
from foundry_kernels.ops.flash_attention.triton.block_range import block_range
from foundry_kernels.ops.flash_attention.triton.bundles import (
    Bits,
    Dense,
    Mask,
    Pairs,
    Range,
    Rows,
    Saved,
    Sizes,
)
from foundry_kernels.ops.flash_attention.triton.dense import add_bias, fixed_part, hide_by_dense
from foundry_kernels.ops.flash_attention.triton.dropout import dropout_scale, kept, load_dropout
from foundry_kernels.ops.flash_attention.triton.mask import in_window, seeing_queries
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
from foundry_kernels.ops.flash_attention.triton.softmax import LOG2E, powers, split_lse
from foundry_kernels.ops.flash_attention.triton.tile_io import (
    head_rows,
    load_rows,
    rows_from,
    store_rows,
)
from foundry_kernels.ops.flash_attention.triton.tiles import bits_of_keys, list_of, tile_at


@triton.jit
def flash_attention_preprocess_kernel(
    dout_ptr, out_ptr, lse_ptr, dlse_ptr, sinks_ptr, delta_ptr, lse_high_ptr, lse_low_ptr, dsinks_ptr,
    n_batch, n_heads, tokens_q,
    do_strides, o_strides, dlse_strides,
    HAS_DLSE: tl.constexpr, HAS_BIAS: tl.constexpr, NEED_DSINKS: tl.constexpr, LSE_LOW: tl.constexpr,
    COMPUTE: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Writes for each row delta = dout . out - dlse and lse in the unit of scores. For rows that see no key, delta is 0
    and lse is +inf, so that all their probabilities are 0. Also writes these rows' part of the gradient of the sinks
    into dsinks [tiles of all sequences, H]. Packed sequences are one sequence here, because rows do not depend on each
    other.

    LSE_LOW: lse is float64 and is passed on as two float32 parts, for float32 inputs and with a bias. With one part,
    the probability of a score of 200 would differ by 1e-5 from the forward pass, and beside a large bias it would be
    wrong.
    """
    pid = tl.program_id(0)
    head = (pid % n_heads).to(tl.int64)
    n = (pid // n_heads % n_batch).to(tl.int64)
    i0 = pid // n_heads // n_batch * BLOCK_M
    rows = i0 + tl.arange(0, BLOCK_M)  # [M]
    m_rows = rows < tokens_q
    first = i0.to(tl.int64)
    dout = head_rows(dout_ptr, do_strides, n, head, first)
    b_dout = load_rows(dout, tokens_q - i0, BLOCK_M, BLOCK_DV, DV, True)
    out = head_rows(out_ptr, o_strides, n, head, first)
    b_out = load_rows(out, tokens_q - i0, BLOCK_M, BLOCK_DV, DV, True)
    at = (n * n_heads + head) * tokens_q + rows
    b_lse = tl.load(lse_ptr + at, mask=m_rows, other=-float("inf"))
    b_delta = tl.sum(b_dout.to(COMPUTE) * b_out.to(COMPUTE), 1)
    if HAS_DLSE:
        p_dlse = dlse_ptr + n * dlse_strides.b + head * dlse_strides.h + rows.to(tl.int64) * dlse_strides.t
        b_delta -= tl.load(p_dlse, mask=m_rows, other=0.0)
    b_delta = tl.where(b_lse == -float("inf"), 0.0, b_delta)
    tl.store(delta_ptr + at, b_delta, mask=m_rows)
    b_lse = tl.where(b_lse == -float("inf"), float("inf"), b_lse).to(tl.float64)
    b_high, b_low = split_lse(b_lse, HAS_BIAS, COMPUTE)
    tl.store(lse_high_ptr + at, b_high, mask=m_rows)
    if LSE_LOW:
        tl.store(lse_low_ptr + at, b_low, mask=m_rows)
    if NEED_DSINKS:
        sink = tl.load(sinks_ptr + head).to(tl.float64)
        b_z = (sink - b_lse) * LOG2E
        if HAS_BIAS:
            b_z = (sink - b_high.to(tl.float64)) * LOG2E - b_low
        b_p = tl.exp2(b_z.to(COMPUTE))
        tl.store(dsinks_ptr + pid, -tl.sum(b_p * b_delta, 0))


@triton.jit
def _hide(b_z, i0, k_pos, mask, bits, j0, n_keys, HAS: tl.constexpr, sizes):
    """The transposed scores [N, M] of the queries from i0 on, -inf where they do not see the key at k_pos [N, 1]. There
    are three equivalent variants; each case uses the one that does not spill registers."""
    rows = tl.arange(0, sizes.BLOCK_M)[None, :]
    if bits is not None:
        b_z = tl.where(bits_of_keys(bits, i0, j0, n_keys, sizes.BLOCK_M, sizes.BLOCK_N), b_z, -float("inf"))
    if mask.left is None and mask.right is None:
        m_seen = rows >= 0
    elif sizes.BLOCK_D > 128:
        m_seen = in_window(k_pos - (i0 + rows), mask)
    elif HAS.bent:
        m_seen = seeing_queries(rows, k_pos, i0, mask)
    else:
        m_seen = seeing_queries(i0 + rows, k_pos, 0, mask)
    return tl.where(m_seen, b_z, -float("inf"))


@triton.jit
def _accumulate_dkdv(
    b_dk, b_dv, b_k, b_v, j0, k_pos, q, dout, saved, order, queries, seqlen_q, n_keys, scoring, mask, pairs,
    dense, modifier, HAS: tl.constexpr, MODIFY: tl.constexpr, NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
    DELTA_FIRST: tl.constexpr, sizes,
):  # fmt: skip
    """Adds the queries of one head in the `Range` queries, or those of the tiles in the list `order`. k_pos [N, 1] is
    the position of each key among the queries.

    All blocks of scores are transposed, [N, M], so that dout and q need no transposition. Keys past the last one need
    no mask: they only affect rows of dk and dv that are not stored. The queries full_start .. full_stop - 1 need none
    either, but a separate loop for them would take registers, which are scarcest here.
    """
    factor = score_factor(scoring, HAS)
    STEP: tl.constexpr = sizes.BLOCK_M if order is None else 1
    for at in range(queries.start, queries.stop, STEP):
        i0 = at if order is None else tile_at(order, at) * sizes.BLOCK_M
        i0 = tl.multiple_of(i0, sizes.BLOCK_M)
        first = tl.cast(i0, tl.int64)  # not in `rows_from`: there it changes how registers are allocated
        rows = i0 + tl.arange(0, sizes.BLOCK_M)[None, :]  # [1, M]
        m_rows = rows < seqlen_q
        b_q = load_rows(rows_from(q, first), seqlen_q - i0, sizes.BLOCK_M, sizes.BLOCK_D, sizes.D, True)  # [M, D]
        b_lse = tl.load(saved.lse_high + rows, mask=m_rows, other=float("inf"))
        if DELTA_FIRST:  # loads it here and not where it is used if that avoids spills
            b_delta = tl.load(saved.delta + rows, mask=m_rows, other=0.0)
        b_s, b_t = scores(dot(b_k, tl.trans(b_q)), k_pos - rows, scoring, HAS)
        places = tl.arange(0, sizes.BLOCK_M)[None, :]
        if HAS.bias:
            b_s = add_bias(b_s, dense, i0, places, seqlen_q, True)
        if HAS.modified:
            b_s, b_slope = MODIFY(b_s, rows, modifier)
        b_z = powers(b_s, factor, b_lse, HAS.natural)
        if saved.lse_low is not None:
            b_z -= tl.load(saved.lse_low + rows, mask=m_rows, other=0.0)
        if HAS.modified:  # past the last query, a function may give NaN
            b_z = tl.where(m_rows, b_z, -float("inf"))
        if HAS.mask:
            b_z = hide_by_dense(b_z, dense, i0, places, seqlen_q, True)
        if mask.left is not None or mask.right is not None or pairs.bits is not None:
            # The compiler evaluates the first condition, and a branch at run time takes registers.
            if sizes.BLOCK_D > 128 or HAS.bent:  # noqa: SIM114
                b_z = _hide(b_z, i0, k_pos, mask, pairs.bits, j0, n_keys, HAS, sizes)
            elif (at < queries.full_start) | (at >= queries.full_stop):
                b_z = _hide(b_z, i0, k_pos, mask, pairs.bits, j0, n_keys, HAS, sizes)
        b_p = tl.exp2(b_z)
        b_dout = load_rows(rows_from(dout, first), seqlen_q - i0, sizes.BLOCK_M, sizes.BLOCK_DV, sizes.DV, True)
        if pairs.dropout is not None:
            keys = tl.arange(0, sizes.BLOCK_N)[:, None]
            m_kept = kept(pairs.dropout, i0, places, j0, keys, sizes)
        if NEED_DV:
            b_pd = b_p
            if pairs.dropout is not None:
                b_pd = tl.where(m_kept, b_p, pairs.dropout.zero)
            b_dv = dot(round_to(b_pd, b_dout.dtype), b_dout, b_dv)
        if NEED_DK:
            if not DELTA_FIRST:
                b_delta = tl.load(saved.delta + rows, mask=m_rows, other=0.0)
            b_dp = dot(b_v, tl.trans(b_dout))
            if pairs.dropout is not None:
                b_dp = tl.where(m_kept, b_dp * pairs.dropout.scale, 0.0)
            b_ds = b_p * (b_dp - b_delta)
            if HAS.modified:
                b_ds = changed_gradient(b_ds, b_slope)
            b_ds = round_to(product_gradient(b_ds, b_t, HAS), b_q.dtype)
            b_dk = dot(b_ds, b_q, b_dk)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["section", "threshold"])
def flash_attention_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_high_ptr, lse_low_ptr, delta_ptr, dk_ptr, dv_ptr,
    cu_seqlens_q_ptr, cu_seqlens_k_ptr, alibi_slopes_ptr,
    attn_mask_ptr, mask_tiles_ptr, mask_bits_ptr, dropout_seed_ptr, dropout_heads_ptr, lists_ptr, score_pointers,
    n_batch, n_parts, members, num_splits, section, tokens_q, tokens_k,
    q_strides, k_strides, v_strides,
    do_strides, dk_strides, dv_strides,
    stride_lseb, score, natural_scale, window, mask_strides, tile_strides, list_strides, threshold, keep_scale,
    score_layout, PREPARE: tl.constexpr, MODIFY: tl.constexpr, HAS: tl.constexpr, VARLEN: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, PTX: tl.constexpr, LSE_LOW: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr, COMPUTE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Programs with the most work come first in their section: under a causal mask the first tiles, and in packed
    sequences those with the most tiles after them.

    A part is `members` query heads of one key-value head. A key-value head has `num_splits` parts, and as many heads in
    dk and dv."""
    scoring = load_scoring(score, COMPUTE)
    mask = Mask(window.left if HAS.left else None, window.right if HAS.right else None)
    sizes: tl.constexpr = Sizes(D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, PTX)
    n, part, tile, tiles = program_order(n_batch, n_parts, section)
    kv_head = part // num_splits
    start_q, seqlen_q, start_k, seqlen_k = seqlen_info(
        n, cu_seqlens_q_ptr, cu_seqlens_k_ptr, tokens_q, tokens_k, VARLEN
    )
    if VARLEN and HAS.right:
        tile -= tiles - tl.cdiv(seqlen_k, BLOCK_N)
    j0 = tile * BLOCK_N
    if j0 < 0 or j0 >= seqlen_k:
        return
    first = tl.cast(start_k, tl.int64) + j0
    offset = seqlen_k - seqlen_q if BOTTOM_RIGHT else 0
    k_pos = (j0 + tl.arange(0, BLOCK_N) - offset)[:, None]  # [N, 1]
    k = head_rows(k_ptr, k_strides, n, kv_head, first)
    b_k = load_rows(k, seqlen_k - j0, BLOCK_N, BLOCK_D, D, True)
    v = head_rows(v_ptr, v_strides, n, kv_head, first)
    b_v = load_rows(v, seqlen_k - j0, BLOCK_N, BLOCK_DV, DV, True)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], COMPUTE)
    b_dv = tl.zeros([BLOCK_N, BLOCK_DV], COMPUTE)
    # For a key the window is mirrored: it is seen by the queries from `right` before it to `left` after it.
    mirrored = Mask(mask.right, mask.left)
    queries = block_range(j0, seqlen_k, seqlen_q, -offset, mirrored, BLOCK_N, BLOCK_M)
    PLAIN_128: tl.constexpr = VARLEN and D == 128 and DV == 128 and not HAS.bent and not HAS.alibi and not LSE_LOW
    DELTA_FIRST: tl.constexpr = PLAIN_128 or (HAS.bias and HAS.dropout and BLOCK_D > 128)
    n_heads = n_parts * members
    j_places = j0 + tl.arange(0, BLOCK_N)[:, None]
    for head in range(part * members, part * members + members):
        q = head_rows(q_ptr, q_strides, n, head, start_q)
        dout = head_rows(dout_ptr, do_strides, n, head, start_q)
        at = n * stride_lseb + head * tokens_q + start_q
        dense = Dense(
            fixed_part(attn_mask_ptr, mask_strides.b, mask_strides.h, mask_strides.s, n, head, j_places, seqlen_k,
                       HAS.keys_differ, False),
            j_places < seqlen_k if HAS.keys_differ else None, mask_strides.t if HAS.queries_differ else None,
        ) if HAS.bias or HAS.mask else None  # fmt: skip
        bits = Bits(
            mask_tiles_ptr + n * tile_strides.b + head * tile_strides.h, mask_bits_ptr, (tile_strides.t, tile_strides.s)
        ) if HAS.tiles else None  # fmt: skip
        dropout = load_dropout(
            dropout_seed_ptr, dropout_heads_ptr, n, head, n_heads, threshold, keep_scale, HAS.dropout_heads, COMPUTE
        ) if HAS.dropout else None  # fmt: skip
        pairs = Pairs(bits, dropout)
        modifier = modifier_of(
            n, head, j_places, dropout_heads_ptr, n_heads, score_pointers, score_layout, HAS, PREPARE, COMPUTE
        ) if HAS.modified else None  # fmt: skip
        head_scoring = of_head(scoring, score, alibi_slopes_ptr, n, head, HAS)
        if HAS.tiles:
            p_list = list_of(lists_ptr, list_strides.b, list_strides.h, list_strides.r, n, head, tile)
            order, visited = p_list + 2, Range(0, 0, tl.load(p_list), tl.load(p_list + 1))
        else:
            order, visited = None, queries
        saved = Saved(lse_high_ptr + at, lse_low_ptr + at if LSE_LOW else None, delta_ptr + at)
        b_dk, b_dv = _accumulate_dkdv(
            b_dk, b_dv, b_k, b_v, j0, k_pos, q, dout, saved, order, visited, seqlen_q, seqlen_k, head_scoring, mask,
            pairs, dense, modifier, HAS, MODIFY, NEED_DK, NEED_DV, DELTA_FIRST, sizes,
        )  # fmt: skip
    if NEED_DK:
        b_dk = round_to(b_dk * natural_scale, dk_ptr.dtype.element_ty)
        dk = head_rows(dk_ptr, dk_strides, n, part, first)
        store_rows(dk, seqlen_k - j0, b_dk, BLOCK_N, BLOCK_D, D)
    if NEED_DV:
        if HAS.dropout:
            b_dv = b_dv * dropout_scale(keep_scale, COMPUTE)
        b_dv = round_to(b_dv, dv_ptr.dtype.element_ty)
        dv = head_rows(dv_ptr, dv_strides, n, part, first)
        store_rows(dv, seqlen_k - j0, b_dv, BLOCK_N, BLOCK_DV, DV)


@triton.jit
def flash_attention_sum_splits_kernel(
    parts_ptr, sum_ptr, n_heads, num_splits, tokens, s_strides, scale,
    COMPUTE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """dk or dv: `scale` times the sum of the partial results [B, Hk, splits, tokens, D] over the splits, in order.
    Packed sequences are one sequence here."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(tokens, BLOCK_M)
    i0 = pid % tiles * BLOCK_M
    head = (pid // tiles % n_heads).to(tl.int64)
    n = (pid // tiles // n_heads).to(tl.int64)
    first = tl.cast(i0, tl.int64)
    stride_split = tl.cast(tokens, tl.int64) * D
    p_parts = parts_ptr + (n * n_heads + head) * num_splits * stride_split + first * D
    b_sum = tl.zeros([BLOCK_M, BLOCK_D], COMPUTE)
    for _ in range(num_splits):
        b_sum += load_rows(Rows(p_parts, D), tokens - i0, BLOCK_M, BLOCK_D, D, True)
        p_parts += stride_split
    b_sum = round_to(b_sum * scale, sum_ptr.dtype.element_ty)
    rows = head_rows(sum_ptr, s_strides, n, head, first)
    store_rows(rows, tokens - i0, b_sum, BLOCK_M, BLOCK_D, D)
