"""Which columns a tile of rows has to visit, and where no mask is needed."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_range(row0, n_rows, n_cols, offset, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
                BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):  # fmt: skip
    """(start, full_start, full_stop, stop) for the rows row0 .. row0 + BLOCK_ROWS - 1, where row r sees the columns
    r + offset - left .. r + offset + right.

    No row sees a column outside of start .. stop. Between full_start and full_stop every row sees every column;
    full_stop may come before full_start. All but stop are multiples of BLOCK_COLS.
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
