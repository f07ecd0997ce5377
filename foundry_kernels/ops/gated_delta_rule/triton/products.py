"""Matmuls whose operands have more digits than the tensor cores take.

Inputs of 16 bits are multiplied as they are. An operand that was computed in float32 (a state, a decayed row) is split
into parts that are exact in a type of the tensor cores, and the matmuls of the parts are summed: in bfloat16, two parts
keep 16 bits and three keep 24; in TF32, two parts keep 22. Rounding it instead would add as much error as the rounding
of the result itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foundry_kernels._triton import INTERPRET
from foundry_kernels._triton.functions import dot, round_to

_INTERPRET = tl.constexpr(INTERPRET)


@triton.jit
def _rest(x, part):
    return x - part.to(tl.float32)


@triton.jit
def _tf32(x):
    """The TF32 value nearest to x, as float32."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)


@triton.jit
def _dot_tf32(a, b, acc):
    if _INTERPRET:  # a GPU ignores the low 13 bits
        a = (a.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
        b = (b.to(tl.uint32, bitcast=True) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.dot(a, b, acc, input_precision="tf32")


@triton.jit
def _by_bf16(a, b, acc, PARTS: tl.constexpr):
    """Adds the smallest matmuls first."""
    a0 = round_to(a, tl.bfloat16)
    b0 = round_to(b, tl.bfloat16)
    if a.dtype == tl.bfloat16:
        b_rest = _rest(b, b0)
        b1 = round_to(b_rest, tl.bfloat16)
        if PARTS == 3:
            acc = dot(a0, round_to(_rest(b_rest, b1), tl.bfloat16), acc)
        acc = dot(a0, b1, acc)
    elif b.dtype == tl.bfloat16:
        a_rest = _rest(a, a0)
        a1 = round_to(a_rest, tl.bfloat16)
        if PARTS == 3:
            acc = dot(round_to(_rest(a_rest, a1), tl.bfloat16), b0, acc)
        acc = dot(a1, b0, acc)
    else:
        a_rest = _rest(a, a0)
        a1 = round_to(a_rest, tl.bfloat16)
        b_rest = _rest(b, b0)
        b1 = round_to(b_rest, tl.bfloat16)
        if PARTS == 3:
            acc = dot(a0, round_to(_rest(b_rest, b1), tl.bfloat16), acc)
            acc = dot(round_to(_rest(a_rest, a1), tl.bfloat16), b0, acc)
            acc = dot(a1, b1, acc)
        acc = dot(a0, b1, acc)
        acc = dot(a1, b0, acc)
    return dot(a0, b0, acc)


@triton.jit
def _by_tf32(a, b, acc):
    a_wide, b_wide = a.to(tl.float32), b.to(tl.float32)
    a0, b0 = a_wide, b_wide  # 16-bit values are exact in TF32
    if b.dtype == tl.float32:
        b0 = _tf32(b_wide)
        acc = _dot_tf32(_tf32(a_wide), b_wide - b0, acc)
    if a.dtype == tl.float32:
        a0 = _tf32(a_wide)
        acc = _dot_tf32(a_wide - a0, b0, acc)
    return _dot_tf32(a0, b0, acc)


@triton.jit
def product(a, b, acc, KIND: tl.constexpr, PARTS: tl.constexpr):
    """acc + a @ b. KIND: how operands of float32 are multiplied, "bf16", "tf32" or "ieee"; PARTS, 2 or 3: of "bf16"."""
    if a.dtype == tl.float64:
        return dot(a, b.to(tl.float64), acc)
    elif b.dtype == tl.float64:
        return dot(a.to(tl.float64), b, acc)
    elif a.dtype != tl.float32 and a.dtype == b.dtype:
        return dot(a, b, acc)
    elif KIND == "bf16":
        return _by_bf16(a, b, acc, PARTS)
    elif KIND == "tf32":
        return _by_tf32(a, b, acc)
    else:
        return dot(a.to(tl.float32), b.to(tl.float32), acc)
