"""Loads, stores and sums of tiles: rows of one head, with a unit stride between columns."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(ptr, stride, n_rows, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """[ROWS, COLS] values at `ptr`. Columns from WIDTH on are 0; with CHECK, so are rows from `n_rows` on."""
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
def add_rows(ptr, stride, n_rows, b_x, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """As `store_rows`, added to what is there, where other programs add at the same time."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    tl.atomic_add(ptr + rows * stride + cols, b_x, mask=(rows < n_rows) & (cols < WIDTH), sem="relaxed")
