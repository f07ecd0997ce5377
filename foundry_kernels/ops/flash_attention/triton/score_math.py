"""What a printed score function calls: operations that Triton does not have, or has with another meaning."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton import INTERPRET
from foundry_kernels._triton.functions import tanh

_INTERPRET = tl.constexpr(INTERPRET)
#: The shape of a number for all pairs. The interpreter makes floats of the bools of numbers when it broadcasts them.
ONE = tl.constexpr([1, 1] if INTERPRET else [])

__all__ = ["ONE", "clamped", "floordiv", "mod", "number", "power", "tanh", "to_int"]


@triton.jit
def number(x):
    """A number for all pairs, see `ONE`."""
    return x + tl.zeros([1, 1], x.dtype) if _INTERPRET else x


@triton.jit
def clamped(at, size, NEGATIVE: tl.constexpr):
    """The index that a load takes. NEGATIVE: it may be below 0, and then counts from the end."""
    if NEGATIVE:
        at = tl.maximum(tl.where(at < 0, at + size, at), 0)
    return tl.minimum(at, size - 1)


@triton.jit
def floordiv(a, b, POSITIVE: tl.constexpr):
    """a // b, rounded down; 0 where b is 0. POSITIVE: a is at least 0 and b above 0, and nothing must be corrected."""
    if POSITIVE:
        return a // b
    else:
        divisor = tl.where(b == 0, 1, b)
        down = a // divisor
        rest = a - down * divisor
        return tl.where(b == 0, 0, down - ((rest != 0) & ((rest ^ divisor) < 0)).to(tl.int32))


@triton.jit
def mod(a, b, POSITIVE: tl.constexpr):
    """The remainder of `floordiv`, of b's sign; 0 where b is 0."""
    if POSITIVE:
        return a % b
    else:
        divisor = tl.where(b == 0, 1, b)
        rest = a % divisor
        rest += tl.where((rest != 0) & ((rest ^ divisor) < 0), divisor, 0)
        return tl.where(b == 0, 0, rest)


@triton.jit
def to_int(x):
    """Towards 0; NaN gives 0, and the result is at most 2^30 in size."""
    largest = tl.full([], 1073741824.0, x.dtype)
    return tl.where(x == x, tl.minimum(tl.maximum(x, -largest), largest), tl.full([], 0.0, x.dtype)).to(tl.int32)


@triton.jit
def power(a, b):
    """a to the power of b. The sign and the special values are those of C's pow, but -0 is as 0.

    The logarithm is split into a whole number and the rest, and b into two halves, or a rounding error of the logarithm
    would be multiplied by b."""
    zero, one = tl.full([], 0.0, a.dtype), tl.full([], 1.0, a.dtype)
    infinite = tl.full([], float("inf"), a.dtype)
    x = tl.abs(a)
    whole = tl.floor(tl.log2(x))
    share = tl.log2(x * tl.exp2(-whole))
    top = tl.floor(b * whole + 0.5)
    if b.dtype == tl.float32:
        high = (b.to(tl.uint32, bitcast=True) & 0xFFFFF000).to(tl.float32, bitcast=True)
        rest = (high * whole - top) + (b - high) * whole
    else:
        rest = b * whole - top
    size = tl.where(tl.abs(top) < 1000.0, tl.exp2(rest + b * share) * tl.exp2(top), tl.exp2(b * tl.log2(x)))
    is_whole = tl.floor(b) == b
    is_odd = is_whole & (tl.floor(b * 0.5) * 2.0 != b)
    signed = tl.where(is_whole | (x == infinite), tl.where(is_odd, -size, size), tl.full([], float("nan"), a.dtype))
    found = tl.where(a < zero, signed, size)
    return tl.where((b == zero) | (a == one) | ((x == one) & (tl.abs(b) == infinite)), one, found)
