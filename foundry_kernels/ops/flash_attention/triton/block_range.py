"""Which columns a tile of rows must visit, and which of them need no mask."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels.ops.flash_attention.triton.bundles import Range


@triton.jit
def block_range(row0, n_rows, n_cols, offset, mask, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr):
    """The `Range` for the rows row0 .. row0 + BLOCK_ROWS - 1, where row r sees the columns r + offset - mask.left ..
    r + offset + mask.right.

    No row sees a column outside of start .. stop. Between full_start and full_stop every row sees every column;
    full_stop may come before full_start. All but stop are multiples of BLOCK_COLS.
    """
    last = tl.minimum(row0 + BLOCK_ROWS, n_rows) - 1
    start, full_start = 0, 0
    stop, full_stop = n_cols, n_cols
    if mask.left is not None:
        start = tl.maximum(row0 + offset - mask.left, 0) // BLOCK_COLS * BLOCK_COLS
        full_start = tl.cdiv(tl.maximum(last + offset - mask.left, 0), BLOCK_COLS) * BLOCK_COLS
    if mask.right is not None:
        stop = tl.minimum(last + offset + mask.right + 1, n_cols)
        full_stop = tl.minimum(tl.maximum(row0 + offset + mask.right + 1, 0), n_cols)
    return Range(start, full_start, full_stop // BLOCK_COLS * BLOCK_COLS, stop)
