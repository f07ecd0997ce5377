"""Activations in Triton, for the kernels of several operations. Needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_factor(b_g, ACTIVATION: tl.constexpr):
    """Returns activation(g) / g; for "sigmoid", the activation itself. For "relu", NaN gives 1."""
    if ACTIVATION == "silu" or ACTIVATION == "sigmoid":
        return 1.0 / (1.0 + tl.exp(-b_g))
    elif ACTIVATION == "relu":
        return tl.where(b_g <= 0.0, 0.0, 1.0).to(b_g.dtype)
    elif ACTIVATION == "gelu":
        return 0.5 + 0.5 * tl.erf(b_g * 0.7071067811865476)
    else:  # (1 + tanh(u)) / 2 is the logistic function of 2u
        return 1.0 / (1.0 + tl.exp(b_g * (b_g * b_g * 0.044715 + 1.0) * -1.5957691216057308))


@triton.jit
def activated(b_g, b_factor, ACTIVATION: tl.constexpr):
    """The activation, from `gate_factor`."""
    if ACTIVATION == "sigmoid":
        return b_factor
    elif ACTIVATION == "relu":
        return tl.where(b_g <= 0.0, 0.0, b_g)
    else:
        return b_g * b_factor


@triton.jit
def derivative(b_g, b_factor, ACTIVATION: tl.constexpr):
    """The activation's derivative, from `gate_factor`."""
    if ACTIVATION == "silu":
        return b_factor * (1.0 + b_g * (1.0 - b_factor))
    elif ACTIVATION == "sigmoid":
        return b_factor * (1.0 - b_factor)
    elif ACTIVATION == "relu":
        return b_factor
    elif ACTIVATION == "gelu":
        return b_factor + b_g * (tl.exp(b_g * b_g * -0.5) * 0.3989422804014327)
    else:
        b_inner = (b_g * b_g * (3 * 0.044715) + 1.0) * 1.5957691216057308
        return b_factor + b_g * (b_factor * (1.0 - b_factor)) * b_inner


@triton.jit
def times_slope(b_d, b_slope, ACTIVATION: tl.constexpr):
    """d * slope, the gradient of the activation's input. "relu" gives 0 where the slope is 0, even if d is infinite or
    NaN."""
    if ACTIVATION == "relu":
        return tl.where(b_slope > 0.0, b_d, 0.0)
    else:
        return b_d * b_slope
