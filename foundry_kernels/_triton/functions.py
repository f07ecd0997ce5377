"""Device functions that the kernels of several operations share. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton import INTERPRET

_INTERPRET = tl.constexpr(INTERPRET)


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x rounded to dtype, to nearest even. The interpreter would truncate float32 to bfloat16, so there the bits are
    rounded first."""
    if _INTERPRET and dtype == tl.bfloat16 and x.dtype == tl.float32:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = tl.where(x == x, rounded, 0x7FC00000).to(tl.uint32).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def dot(a, b, acc=None):
    """acc + a @ b with exact products and wide sums.

    The interpreter multiplies the bits of bfloat16 as if they were integers, so there both sides are widened first.
    """
    if a.dtype == tl.float64:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float64)
    elif _INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def row_offset(row, n1, n2, s0, s1, s2, RANK: tl.constexpr):
    """Element offset of row number `row` (int64), where rows are numbered over dimensions (n0, n1, n2) with strides
    (s0, s1, s2). A lower RANK uses only the last ones."""
    if RANK == 1:
        return row * s2
    elif RANK == 2:
        return (row // n2) * s1 + (row % n2) * s2
    else:
        return (row // n2 // n1) * s0 + (row // n2 % n1) * s1 + (row % n2) * s2


@triton.jit
def tanh(x):
    """Has float32's relative accuracy. Near 0, where 1 - 2 / (exp(2|x|) + 1) would cancel, it is a polynomial instead:
    the least-squares fit of tanh(x) / x over |x| < 0.62, within 5e-9."""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * 2.8853900817779268) + 1.0)  # 2 log2(e)
    far = tl.where(x < 0, -far, far)
    if x.dtype == tl.float64:
        return far
    else:
        x2 = x * x
        series = -0.33333282 + x2 * (0.13331443 + x2 * (-0.053740111 + x2 * (0.020641122 - x2 * 0.0057078402)))
        return tl.where(size < 0.6, x + x * (x2 * series), far)


@triton.jit
def reciprocal_rms(sum_of_squares, n_cols, eps):
    """1 / sqrt(mean square + eps) of rows of n_cols values."""
    mean = sum_of_squares / n_cols
    if mean.dtype == tl.float32:  # correctly rounded: one value a row costs nothing
        return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    return 1.0 / tl.sqrt(mean + eps)


@triton.jit
def normalized(b_x, rstd, x_dtype: tl.constexpr, ROUND_FIRST: tl.constexpr, COMPUTE: tl.constexpr):
    """x * rstd, in the precision in which the forward pass multiplies it by the weight."""
    b_n = b_x * rstd
    if ROUND_FIRST:
        b_n = round_to(b_n, x_dtype).to(COMPUTE)
    return b_n


@triton.jit
def dropout_factors(seed_ptr, row, start, threshold, scale, shape: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """The factors of dropout (see `core.dropout`) for a block of this shape: its columns are the BLOCK_COLS (at least
    4) from `start` on, a multiple of 4. `row` (int64) is one row, or rows [R, 1] for a block [R, BLOCK_COLS].

    A counter's four words are joined in one thread, in the order of their columns."""
    group = start // 4 + tl.arange(0, BLOCK_COLS // 4)
    if len(shape) == 2:
        group = group[None, :]
    least, row = tl.cast(threshold, tl.uint32), tl.cast(row, tl.int64)
    w0, w1, w2, w3 = tl.philox(tl.load(seed_ptr), group, row.to(tl.uint32), (row >> 32).to(tl.uint32), 0)
    pairs = tl.join(tl.join(w0 >= least, w2 >= least), tl.join(w1 >= least, w3 >= least))
    return tl.where(tl.reshape(pairs, shape), scale, 0.0)


@triton.jit
def sum_partials_kernel(
    part_ptr, out_ptr, n_parts, n_cols,
    COMPUTE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """out[c] = sum over p of part[p, c], rounded."""
    cols = (tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    b_sum = tl.zeros([BLOCK_ROWS, BLOCK_COLS], COMPUTE)
    for start in range(0, n_parts, BLOCK_ROWS):
        rows = start + tl.arange(0, BLOCK_ROWS)[:, None]
        mask = (rows < n_parts) & (cols < n_cols)
        b_sum += tl.load(part_ptr + rows.to(tl.int64) * n_cols + cols, mask=mask, other=0.0)
    tl.store(out_ptr + cols, round_to(tl.sum(b_sum, 0)[None, :], out_ptr.dtype.element_ty), mask=cols < n_cols)
