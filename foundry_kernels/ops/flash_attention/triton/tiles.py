"""What the attention kernels share: blocks of rows, exact dots, scores, and which tiles see each other.

Scores are in units of log2(e), so that every exponential is one `exp2`; b_ is a block of values, m_ a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton import INTERPRET

_INTERPRET = tl.constexpr(INTERPRET)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(ptr, stride, n_rows, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """[ROWS, COLS] values at `ptr`; columns from WIDTH on are 0, and with CHECK rows from `n_rows` on."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    p = ptr + rows * stride + cols
    if CHECK and WIDTH != COLS:
        return tl.load(p, mask=(rows < n_rows) & (cols < WIDTH), other=0.0)
    elif CHECK:
        return tl.load(p, mask=rows < n_rows, other=0.0)
    elif WIDTH != COLS:
        return tl.load(p, mask=cols < WIDTH, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def store_rows(ptr, stride, n_rows, b_x, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    tl.store(ptr + rows * stride + cols, b_x, mask=(rows < n_rows) & (cols < WIDTH))


@triton.jit
def dot(a, b, acc=None):
    """acc + a @ b, exact products and wide sums. The interpreter multiplies the bits of bfloat16: widened there."""
    if a.dtype == tl.float64:
        return tl.dot(a, b, acc, input_precision="ieee", out_dtype=tl.float64)
    elif _INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def tanh(x):
    """To float32 accuracy relative to the result: where the quotient of exponentials would cancel, a polynomial (the
    least-squares fit of tanh(x) / x over |x| < 0.62, within 5e-9)."""
    size = tl.abs(x)
    far = 1.0 - 2.0 / (tl.exp2(size * (2.0 * LOG2E)) + 1.0)
    far = tl.where(x < 0, -far, far)
    if x.dtype == tl.float64:
        return far
    else:
        x2 = x * x
        series = -0.33333282 + x2 * (0.13331443 + x2 * (-0.053740111 + x2 * (0.020641122 - x2 * 0.0057078402)))
        return tl.where(size < 0.6, x + x * (x2 * series), far)


@triton.jit
def scores(b_qk, ahead, scale, cap, slope, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """(b_s, b_t): scores from the products q.k, `ahead` being how far a key lies ahead of a query.

    Without cap and ALiBi b_s are the products themselves, still to be multiplied by `scale` (see `unit`). b_t is the
    hyperbolic tangent that a cap takes.
    """
    b_t = b_qk
    if HAS_CAP:
        b_t = tanh(b_qk * scale)
        b_s = b_t * cap
    elif HAS_SLOPES:
        b_s = b_qk * scale
    else:
        b_s = b_qk
    if HAS_SLOPES:
        b_s -= slope * tl.abs(ahead).to(b_s.dtype)
    return b_s, b_t


@triton.jit
def unit(scale, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """What `scores` leaves to be multiplied: folded into the subtraction before exp2, it costs nothing."""
    if HAS_CAP or HAS_SLOPES:
        return 1.0
    else:
        return scale


@triton.jit
def in_window(ahead, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    m_seen = ahead == ahead
    if HAS_LEFT:
        m_seen = m_seen & (ahead >= -left)
    if HAS_RIGHT:
        m_seen = m_seen & (ahead <= right)
    return m_seen


@triton.jit
def locate(n, starts_q_ptr, starts_k_ptr, n_queries, n_keys, VARLEN: tl.constexpr):
    """(first query, queries, first key, keys) of sequence n; the counts given are those of a dense sequence or of all
    packed ones. Packed starts that overrun are cut, so that nothing outside of the tensors is touched."""
    if VARLEN:
        q0, queries = _packed(starts_q_ptr + n, n_queries)
        k0, keys = _packed(starts_k_ptr + n, n_keys)
    else:
        q0, queries = 0, n_queries
        k0, keys = 0, n_keys
    return q0, queries, k0, keys


@triton.jit
def _packed(starts_ptr, total):
    start = tl.minimum(tl.maximum(tl.load(starts_ptr), 0), total).to(tl.int32)
    stop = tl.minimum(tl.maximum(tl.load(starts_ptr + 1), 0), total).to(tl.int32)
    return start, tl.maximum(stop - start, 0)


@triton.jit
def span(row0, n_rows, n_cols, offset, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
         BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):  # fmt: skip
    """Which columns matter to rows row0 .. row0 + BLOCK_ROWS - 1, of which row r sees r + offset - left .. r + offset +
    right: `(start, full_start, full_stop, stop)`.

    Between full_start and full_stop (which may lie before it) every row sees every column; outside of start .. stop no
    row sees any. All are multiples of BLOCK_COLS but stop.
    """
    last = tl.minimum(row0 + BLOCK_ROWS, n_rows) - 1
    start, full_start = 0, 0
    stop, full_stop = n_cols, n_cols
    if HAS_LEFT:
        start = tl.maximum(row0 + offset - left, 0) // BLOCK_COLS * BLOCK_COLS
        full_start = tl.cdiv(tl.maximum(last + offset - left, 0), BLOCK_COLS) * BLOCK_COLS
    if HAS_RIGHT:
        stop = tl.minimum(last + offset + right + 1, n_cols)
        full_stop = tl.minimum(tl.maximum(row0 + offset + right + 1, 0), n_cols)
    return start, full_start, full_stop // BLOCK_COLS * BLOCK_COLS, stop
