"""Matrix products of tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton import INTERPRET

_INTERPRET = tl.constexpr(INTERPRET)


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
