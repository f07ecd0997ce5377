"""Dense masks and biases, read one tile at a time. Strides are arbitrary, and any of the four dimensions may be
broadcast."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fixed_part(
    ptr, stride_b, stride_h, stride, n, head, places, count, DIFFER: tl.constexpr, CLAMP: tl.constexpr = True
):  # fmt: skip
    """Pointers to the places [M, 1] or [N, 1] of a tile's rows, for one head of sequence n or for each row's head.
    These places do not change in the loop. Without DIFFER the dimension has one element. With CLAMP, places past the
    last one are replaced by it, so that loads need no mask; but they are then loaded one by one."""
    ptr += n * stride_b + head * stride_h
    if DIFFER:
        if CLAMP:
            places = tl.minimum(places, count - 1)
        ptr += places.to(tl.int64) * stride
    return ptr


@triton.jit
def load_dense(dense, first, places, count, CHECK: tl.constexpr):
    """The values of `dense` at the places first + `places` [1, N] of the loop's dimension, which has `count` elements.
    With CHECK, values beyond them are 0. A broadcast mask gives one row, one column or one element."""
    p = dense.ptr
    if dense.stride is not None:
        p += places.to(tl.int64) * dense.stride
        p += tl.cast(first, tl.int64) * dense.stride
    CHECKED: tl.constexpr = CHECK and dense.stride is not None
    if CHECKED and dense.m_rows is not None:
        return tl.load(p, mask=(places < count - first) & dense.m_rows, other=0)
    elif CHECKED:
        return tl.load(p, mask=places < count - first, other=0)
    elif dense.m_rows is not None:
        return tl.load(p, mask=dense.m_rows, other=0)
    else:
        return tl.load(p)


@triton.jit
def add_bias(b_s, bias, first, places, count, CHECK: tl.constexpr):
    """The scores and the bias, both in natural units."""
    return b_s + _widened(load_dense(bias, first, places, count, CHECK), b_s.dtype)


@triton.jit
def _widened(b_x, DTYPE: tl.constexpr):
    """b_x as DTYPE. For bfloat16 the compiler would need two instructions where one is enough."""
    if b_x.dtype == tl.bfloat16 and DTYPE == tl.float32:  # noqa: SIM300
        return (b_x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return b_x.to(DTYPE)


@triton.jit
def hide_by_dense(b_s, allowed, first, places, count, CHECK: tl.constexpr):
    """The scores, -inf where the bool mask is False."""
    return tl.where(load_dense(allowed, first, places, count, CHECK), b_s, -float("inf"))
