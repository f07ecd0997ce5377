"""Masks by tiles of 64 queries and 64 keys, see `ops.flash_attention.attention_mask`.

For each tile of a kernel's rows, `tiles` lists the tiles to visit: first those that need no mask, then those that need
one, because the mask, an edge of the window or the last key crosses them. So a kernel has two loops without branches,
which load their data ahead.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels.ops.flash_attention.triton.block_range import block_range
from foundry_kernels.ops.flash_attention.triton.bundles import Mask

#: Queries or keys of a tile of the mask.
TILE = tl.constexpr(64)


@triton.jit
def _kinds(p_row, stride_r, stride_c, row0, n_rows, n_cols, tile, n_tiles, offset, mask,
           BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):  # fmt: skip
    """Which of the column tiles `tile` [C] are visited without a mask, and which with one."""
    cols = block_range(row0, n_rows, n_cols, offset, mask, BLOCK_ROWS, BLOCK_COLS)
    first = tile * BLOCK_COLS
    m_some, m_all = tile < 0, tile >= 0
    last_row, last_col = tl.minimum(row0 + BLOCK_ROWS, n_rows) - 1, n_cols - 1
    for a in tl.static_range((BLOCK_ROWS + 63) // 64):  # a tile of fewer rows is within one of the mask's
        for b in tl.static_range((BLOCK_COLS + 63) // 64):
            i = tl.minimum(row0 // TILE + a, last_row // TILE)
            j = tl.minimum(first // TILE + b, last_col // TILE)
            p_tile = p_row + i.to(tl.int64) * stride_r + j.to(tl.int64) * stride_c
            number = tl.load(p_tile, mask=tile < n_tiles, other=0)
            m_some, m_all = m_some | (number != 0), m_all & (number == 1)
    m_seen = m_some & (first >= cols.start) & (first < cols.stop) & (tile < n_tiles)
    m_whole = m_seen & m_all & (first >= cols.full_start) & (first < cols.full_stop)
    return m_whole, m_seen & (m_whole == 0)


@triton.jit
def flash_attention_tiles_kernel(
    mask_tiles_ptr, lists_ptr, n_heads, n_row_tiles, n_tiles, n_rows, n_cols,
    stride_tileb, stride_tileh, stride_tiler, stride_tilec, left, right,
    ALIGN_ENDS: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Writes a row of lists [b, h, row tiles, n_tiles + 2]: the number of tiles without a mask, the number of all
    visited tiles, and these tiles."""
    pid = tl.program_id(0)
    row_tile = pid % n_row_tiles
    head = (pid // n_row_tiles % n_heads).to(tl.int64)
    n = (pid // n_row_tiles // n_heads).to(tl.int64)
    p_row = mask_tiles_ptr + n * stride_tileb + head * stride_tileh
    p_list = lists_ptr + pid.to(tl.int64) * (n_tiles + 2)
    mask = Mask(left if HAS_LEFT else None, right if HAS_RIGHT else None)
    row0, offset = row_tile * BLOCK_ROWS, n_cols - n_rows if ALIGN_ENDS else 0
    n_whole, n_mixed = 0, 0
    for start in range(0, n_tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        m_whole, m_mixed = _kinds(p_row, stride_tiler, stride_tilec, row0, n_rows, n_cols, tile, n_tiles, offset, mask,
                                  BLOCK_ROWS, BLOCK_COLS)  # fmt: skip
        n_whole += tl.sum(m_whole.to(tl.int32), 0)
        n_mixed += tl.sum(m_mixed.to(tl.int32), 0)
    tl.store(p_list, n_whole)
    tl.store(p_list + 1, n_whole + n_mixed)
    tl.store(p_list + 2, 0, mask=n_whole + n_mixed == 0)  # loaded ahead if there is no tile
    p_whole, p_mixed = p_list + 2, p_list + 2 + n_whole
    for start in range(0, n_tiles, CHUNK):
        tile = start + tl.arange(0, CHUNK)
        m_whole, m_mixed = _kinds(p_row, stride_tiler, stride_tilec, row0, n_rows, n_cols, tile, n_tiles, offset, mask,
                                  BLOCK_ROWS, BLOCK_COLS)  # fmt: skip
        whole, mixed = m_whole.to(tl.int32), m_mixed.to(tl.int32)
        tl.store(p_whole + tl.cumsum(whole, 0) - 1, tile, mask=m_whole)
        tl.store(p_mixed + tl.cumsum(mixed, 0) - 1, tile, mask=m_mixed)
        p_whole += tl.sum(whole, 0)
        p_mixed += tl.sum(mixed, 0)


@triton.jit
def list_of(lists_ptr, stride_b, stride_h, stride_r, n, head, tile):
    """The list of one row tile, see `flash_attention_tiles_kernel`."""
    return lists_ptr + n * stride_b + head * stride_h + tile.to(tl.int64) * stride_r


@triton.jit
def tile_at(order, at):
    """The tile at place `at` of a list, or tile `at` itself where there is no list."""
    if order is None:
        return at
    else:
        return tl.load(order + at)


@triton.jit
def _bit(low, high, places):
    """Whether the bit at `places` is set; high is None or has the bits from 32 on. The shift that is the same for all
    elements of a thread comes first."""
    word = low if high is None else tl.where(places & 32 != 0, high, low)
    return (word >> (places & 7).to(tl.uint32)) & (1 << (places & 24)).to(tl.uint32) != 0


@triton.jit
def bits_of_rows(bits, j0, BLOCK_N: tl.constexpr):
    """Which of the keys from j0 on [M, N] the queries of `bits` see. A tile of keys is within one of the mask's."""
    b_number = tl.load(bits.tiles + (j0 // TILE).to(tl.int64) * bits.stride)
    b_word = tl.load(bits.words + b_number.to(tl.int64) * TILE).to(tl.uint64, bitcast=True)  # [M, 1]
    cols = tl.arange(0, BLOCK_N)[None, :]
    if BLOCK_N < 64:
        b_word = b_word >> (j0 % TILE).to(tl.uint64)
    if BLOCK_N <= 32:
        return _bit(b_word.to(tl.uint32), None, cols)
    else:
        return _bit(b_word.to(tl.uint32), (b_word >> 32).to(tl.uint32), cols)


@triton.jit
def bits_of_keys(bits, i0, j0, n_keys, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Which of the queries from i0 on see the keys from j0 on [N, M]. A tile of queries is within one of the mask's; a
    tile of keys has one or two of them."""
    p_row = bits.tiles + (i0 // TILE).to(tl.int64) * bits.stride[0]
    p_words = bits.words + i0 % TILE + tl.arange(0, BLOCK_M)[None, :]
    cols = tl.arange(0, BLOCK_N)[:, None]
    number = tl.load(p_row + (j0 // TILE).to(tl.int64) * bits.stride[1])
    b_word = tl.load(p_words + number.to(tl.int64) * TILE).to(tl.uint64, bitcast=True)  # [1, M]
    if BLOCK_N < 64:
        b_word = b_word >> (j0 % TILE).to(tl.uint64)
    low, high = b_word.to(tl.uint32), (b_word >> 32).to(tl.uint32)
    if BLOCK_N > 64:
        tl.static_assert(BLOCK_N == 128)
        j = tl.minimum(j0 // TILE + 1, (n_keys - 1) // TILE)
        number = tl.load(p_row + j.to(tl.int64) * bits.stride[1])
        b_word = tl.load(p_words + number.to(tl.int64) * TILE).to(tl.uint64, bitcast=True)
        low = tl.where(cols & 64 != 0, b_word.to(tl.uint32), low)
        high = tl.where(cols & 64 != 0, (b_word >> 32).to(tl.uint32), high)
    return _bit(low, high, cols)
