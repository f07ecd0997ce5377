"""Dense masks and biases, read a tile at a time, by any strides and of any of the four dimensions."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def fixed_part(ptr, stride_b, stride_h, stride, n, head, places, count, DIFFER: tl.constexpr):
    """Pointers to the places [M, 1] or [N, 1] of a tile's rows, in a dimension that moves no more, of one head of
    sequence n or each row's. Without DIFFER the dimension has one element. Places past the last one are taken for it,
    so that reading them needs no mask."""
    ptr += n * stride_b + head * stride_h
    if DIFFER:
        ptr += tl.minimum(places, count - 1).to(tl.int64) * stride
    return ptr


@triton.jit
def load_dense(dense, first, places, count, CHECK: tl.constexpr):
    """What `dense` has for the places first + `places` [1, N] of the dimension that moves, of which there are `count`:
    with CHECK those beyond are 0. What is broadcast has one row, one column or one element."""
    if dense.stride is None:
        return tl.load(dense.ptr)
    else:
        p = dense.ptr + tl.cast(first, tl.int64) * dense.stride + places.to(tl.int64) * dense.stride
        if CHECK:
            return tl.load(p, mask=places < count - first, other=0)
        else:
            return tl.load(p)


@triton.jit
def add_bias(b_s, bias, first, places, count, CHECK: tl.constexpr):
    """The scores and the bias, both in natural units."""
    return b_s + load_dense(bias, first, places, count, CHECK).to(b_s.dtype)


@triton.jit
def hide_by_dense(b_s, allowed, first, places, count, CHECK: tl.constexpr):
    """The scores, -inf where the bool mask is False."""
    return tl.where(load_dense(allowed, first, places, count, CHECK), b_s, -float("inf"))
