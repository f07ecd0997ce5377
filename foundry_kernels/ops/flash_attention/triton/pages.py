"""Keys and values in pages. The page of each key is looked up, so that pages may have any size."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def offsets_in_pages(pages, stride_page, stride, j0, seqlen_k, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """The offsets [ROWS, 1] of the keys or values from j0 on, relative to the first page. To read only inside of the
    tensor, keys from `seqlen_k` on get page 0, and page numbers out of range are clamped."""
    keys = j0 + tl.arange(0, ROWS)[:, None]
    position = pages.start + keys
    page = tl.load(pages.table + position // PAGE_SIZE, mask=keys < seqlen_k, other=0)
    page = tl.minimum(tl.maximum(page, 0), pages.last).to(tl.int64)
    return page * stride_page + (position % PAGE_SIZE).to(tl.int64) * stride


@triton.jit
def load_from_pages(
    x, pages, stride_page, j0, seqlen_k, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    CHECK: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Loads ROWS rows of x from j0 on, as `load_rows` does, from pages."""
    cols = tl.arange(0, COLS)[None, :]
    p = x.ptr + offsets_in_pages(pages, stride_page, x.stride, j0, seqlen_k, ROWS, PAGE_SIZE) + cols
    m_rows = j0 + tl.arange(0, ROWS)[:, None] < seqlen_k
    if CHECK and WIDTH != COLS:
        return tl.load(p, mask=m_rows & (cols < WIDTH), other=0.0)
    elif CHECK:
        return tl.load(p, mask=m_rows, other=0.0)
    elif WIDTH != COLS:
        return tl.load(p, mask=cols < WIDTH, other=0.0)
    else:
        return tl.load(p)
