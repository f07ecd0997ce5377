"""The kernels of grouped_mm.

A tile of rows belongs to one group. Programs are numbered over the tiles of all groups; the grid has the largest
possible number of tiles. Each program finds its group from the ends of groups, which are only on the device. Rows after
the last group count as one more group, whose results are 0.

Names: b_ is a block of values, p_ a block of pointers, m_ a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton.functions import dot, round_to

#: The compiler does not specialise on these: it would compile more kernels without making them faster.
_PLAIN = ("n_rows", "n_groups")


@triton.jit
def _bounds(offs_ptr, groups, n_rows, n_groups):
    """The first row of each group and one past its last row; group n_groups has the remaining rows. Clamped to 0 ..
    n_rows for any ends."""
    b_start = tl.load(offs_ptr + groups - 1, mask=(groups > 0) & (groups <= n_groups), other=0)
    b_end = tl.load(offs_ptr + groups, mask=groups < n_groups, other=n_rows)
    b_start = tl.where(groups > n_groups, n_rows, tl.minimum(tl.maximum(b_start, 0), n_rows))
    return b_start, tl.maximum(b_start, tl.minimum(b_end, n_rows))


@triton.jit
def _swizzled(i, n_down, n_across, TOGETHER: tl.constexpr):
    """Row and column of tile i. Tiles are numbered in bands of TOGETHER rows, column by column within a band, so that
    programs that run at the same time share the data of both operands in L2."""
    in_band = TOGETHER * n_across
    first = i // in_band * TOGETHER
    down = tl.minimum(n_down - first, TOGETHER)
    return first + i % in_band % down, i % in_band // down


@triton.jit
def _load(p, m_down, m_across, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """A block, masked in dimensions that are not a multiple of the tile."""
    if DOWN and ACROSS:
        return tl.load(p, mask=m_down & m_across, other=0.0)
    elif DOWN:
        return tl.load(p, mask=m_down, other=0.0)
    elif ACROSS:
        return tl.load(p, mask=m_across, other=0.0)
    else:
        return tl.load(p)


@triton.jit(do_not_specialize=_PLAIN)
def grouped_mm_kernel(
    x_ptr, weight_ptr, offs_ptr, y_ptr,
    n_rows, n_groups, n_in, n_out, stride_xm, stride_we, stride_wk, stride_wn,
    WHOLE_K: tl.constexpr, WHOLE_N: tl.constexpr, TRANSPOSED: tl.constexpr, COMPUTE: tl.constexpr,
    GROUPS: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """y [n_rows, n_out] = x times the matrix of each row's group. GROUPS is a power of two above n_groups; WHOLE_K and
    WHOLE_N: n_in and n_out are multiples of the tile. TRANSPOSED: stride_wn is not 1."""
    program = tl.program_id(0)
    n_across = tl.cdiv(n_out, BLOCK_N)
    groups = tl.arange(0, GROUPS)
    b_start, b_end = _bounds(offs_ptr, groups, n_rows, n_groups)
    b_tiles = tl.cdiv(b_end - b_start, BLOCK_M) * n_across
    b_last = tl.cumsum(b_tiles.to(tl.int64), 0)  # decreasing ends could count more tiles than 31 bits hold
    group = tl.sum((b_last <= program).to(tl.int32), 0)
    here = groups == group  # False for all groups in a surplus program, whose tile has no rows
    start = tl.sum(tl.where(here, b_start, 0), 0)
    end = tl.sum(tl.where(here, b_end, 0), 0)
    n_tiles = tl.sum(tl.where(here, b_tiles, 0), 0)
    within = (program - tl.sum(tl.where(here, b_last, 0), 0)).to(tl.int32) + n_tiles
    tile_m, tile_n = _swizzled(within, tl.maximum(n_tiles // n_across, 1), n_across, TOGETHER)

    rows = start + tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_cols = (cols < n_out)[None, :]
    dims = tl.arange(0, BLOCK_K)
    # Rows past the group's end are clamped, because a mask takes instructions in the loop. So are columns past the last
    # one if the matrix is transposed; otherwise a load has several columns, and clamping would split it.
    read = tl.minimum(rows, end - 1).to(tl.int64)
    read_cols = tl.minimum(cols, n_out - 1) if TRANSPOSED and not WHOLE_N else cols
    MASK_N: tl.constexpr = not (WHOLE_N or TRANSPOSED)
    p_x = x_ptr + read[:, None] * stride_xm + dims[None, :]  # [M, K]
    p_w = weight_ptr + group.to(tl.int64) * stride_we
    p_w += dims.to(tl.int64)[:, None] * stride_wk + read_cols.to(tl.int64)[None, :] * stride_wn  # [K, N]
    b_y = tl.zeros([BLOCK_M, BLOCK_N], COMPUTE)
    needed = tl.where(group < n_groups, n_in, 0)
    for first in range(0, needed, BLOCK_K):
        m_dims = dims < n_in - first
        b_x = _load(p_x, m_dims[None, :], m_dims[None, :], not WHOLE_K, False)
        b_w = _load(p_w, m_dims[:, None], m_cols, not WHOLE_K, MASK_N)
        b_y = dot(b_x, b_w, b_y)
        p_x += BLOCK_K
        p_w += BLOCK_K * stride_wk
    p_y = y_ptr + rows.to(tl.int64)[:, None] * n_out + cols[None, :]
    tl.store(p_y, round_to(b_y, y_ptr.dtype.element_ty), mask=(rows < end)[:, None] & m_cols)


@triton.jit(do_not_specialize=_PLAIN)
def grouped_mm_dweight_kernel(
    a_ptr, b_ptr, offs_ptr, out_ptr,
    n_rows, n_groups, n_a, n_b, stride_a, stride_b,
    WHOLE: tl.constexpr, COMPUTE: tl.constexpr, TOGETHER: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    """out [n_groups, n_a, n_b] = a^T b over the rows of each group, in order. WHOLE: n_a and n_b are multiples of the
    tile."""
    n_across = tl.cdiv(n_b, BLOCK_B)
    n_down = tl.cdiv(n_a, BLOCK_A)
    group = tl.program_id(0) // (n_down * n_across)
    start, end = _bounds(offs_ptr, group, n_rows, n_groups)
    tile_a, tile_b = _swizzled(tl.program_id(0) % (n_down * n_across), n_down, n_across, TOGETHER)

    o_a = tile_a * BLOCK_A + tl.arange(0, BLOCK_A)
    o_b = tile_b * BLOCK_B + tl.arange(0, BLOCK_B)
    m_a, m_b = (o_a < n_a)[:, None], (o_b < n_b)[None, :]
    rows = tl.arange(0, BLOCK_ROWS)
    first = (start + rows).to(tl.int64)
    p_a = a_ptr + first[None, :] * stride_a + o_a[:, None]  # [A, rows]
    p_b = b_ptr + first[:, None] * stride_b + o_b[None, :]  # [rows, B]
    b_out = tl.zeros([BLOCK_A, BLOCK_B], COMPUTE)
    n_own = end - start
    whole = n_own // BLOCK_ROWS * BLOCK_ROWS
    for _done in range(0, whole, BLOCK_ROWS):  # without a mask of rows, which would be a third of the instructions
        b_a = _load(p_a, True, m_a, False, not WHOLE)
        b_b = _load(p_b, True, m_b, False, not WHOLE)
        b_out = dot(b_a, b_b, b_out)
        p_a += BLOCK_ROWS * stride_a
        p_b += BLOCK_ROWS * stride_b
    if whole < n_own:
        m_rows = rows < n_own - whole
        b_a = _load(p_a, m_rows[None, :], m_a, True, not WHOLE)
        b_b = _load(p_b, m_rows[:, None], m_b, True, not WHOLE)
        b_out = dot(b_a, b_b, b_out)
    o_out = group.to(tl.int64) * n_a * n_b + o_a.to(tl.int64)[:, None] * n_b + o_b[None, :]
    tl.store(out_ptr + o_out, round_to(b_out, out_ptr.dtype.element_ty), mask=m_a & m_b)


@triton.jit
def _later(a, b):
    return tl.maximum(a, b)


@triton.jit(do_not_specialize=_PLAIN)
def grouped_mm_ends_kernel(offs_ptr, ends_ptr, n_rows, n_groups, GROUPS: tl.constexpr):
    """Makes the ends non-decreasing and within 0 .. n_rows; valid ends do not change."""
    groups = tl.arange(0, GROUPS)
    b_end = tl.load(offs_ptr + groups, mask=groups < n_groups, other=0)
    b_end = tl.associative_scan(tl.minimum(tl.maximum(b_end, 0), n_rows), 0, _later)
    tl.store(ends_ptr + groups, b_end, mask=groups < n_groups)


@triton.jit
def _fill(ptr, size, first, step, BLOCK: tl.constexpr):
    b_zero = tl.zeros([BLOCK], ptr.dtype.element_ty)
    for i in range(tl.cast(first, tl.int64) * BLOCK, size, step * BLOCK):
        o = i + tl.arange(0, BLOCK)
        tl.store(ptr + o, b_zero, mask=o < size)


@triton.jit(do_not_specialize=_PLAIN)
def grouped_mm_zeros_kernel(
    ends_ptr, dx_ptr, dweight_ptr, n_rows, n_groups, n_in, matrix, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Writes zeros to the rows of dx after the last group, and to the matrices of dweight (`matrix` elements each) of
    empty groups. PROGRAMS programs share a group; dx or dweight may be None."""
    group = tl.program_id(0) // PROGRAMS
    start, end = _bounds(ends_ptr, group, n_rows, n_groups)
    first = tl.program_id(0) % PROGRAMS
    if group == n_groups:
        if dx_ptr is not None:
            _fill(dx_ptr + start.to(tl.int64) * n_in, (end - start).to(tl.int64) * n_in, first, PROGRAMS, BLOCK)
    elif dweight_ptr is not None:
        size = tl.where(start == end, tl.cast(matrix, tl.int64), 0)
        _fill(dweight_ptr + group.to(tl.int64) * matrix, size, first, PROGRAMS, BLOCK)
