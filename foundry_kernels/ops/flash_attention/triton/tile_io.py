"""Loads and stores of tiles: rows of one head, whose columns have stride 1."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels.ops.flash_attention.triton.bundles import Keys, Rows


@triton.jit
def head_rows(ptr, strides, n, head, first):
    """Returns the `Rows` of one head of sequence n from row `first` on."""
    return Rows(ptr + n * strides.b + head * strides.h + tl.cast(first, tl.int64) * strides.t, strides.t)


@triton.jit
def head_keys(k_ptr, v_ptr, k_strides, v_strides, n, head, group, start_k, seqlen_k):
    """Returns the `Keys` of sequence n for query `head`; `group` heads share them. It does not call `head_rows`, which
    would change the machine code."""
    p_k = k_ptr + (n * k_strides.b + head // group * k_strides.h + tl.cast(start_k, tl.int64) * k_strides.t)
    p_v = v_ptr + (n * v_strides.b + head // group * v_strides.h + tl.cast(start_k, tl.int64) * v_strides.t)
    return Keys(Rows(p_k, k_strides.t), Rows(p_v, v_strides.t), seqlen_k)


@triton.jit
def rows_from(x, first):
    """Returns the `Rows` of x from row `first` on."""
    return Rows(x.ptr + tl.cast(first, tl.int64) * x.stride, x.stride)


@triton.jit
def load_rows(x, n_rows, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, CHECK: tl.constexpr):
    """Returns the values [ROWS, COLS] of the `Rows` x. Columns from WIDTH on are 0; with CHECK, rows from `n_rows` on
    are 0 too."""
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    p = x.ptr + rows * x.stride + cols
    if CHECK and WIDTH != COLS:
        return tl.load(p, mask=(rows < n_rows) & (cols < WIDTH), other=0.0)
    elif CHECK:
        return tl.load(p, mask=rows < n_rows, other=0.0)
    elif WIDTH != COLS:
        return tl.load(p, mask=cols < WIDTH, other=0.0)
    else:
        return tl.load(p)


@triton.jit
def store_rows(x, n_rows, b_x, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.arange(0, ROWS)[:, None]
    cols = tl.arange(0, COLS)[None, :]
    tl.store(x.ptr + rows * x.stride + cols, b_x, mask=(rows < n_rows) & (cols < WIDTH))
