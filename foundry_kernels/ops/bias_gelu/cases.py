"""Sample inputs, and the size of what a gradient sums; the parity suite enumerates this."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Scales, Tensors
from foundry_kernels.ops.swiglu.cases import dropped, saturated
from foundry_kernels.testing import Arg, Case, normal

#: No activation's derivative passes this.
_STEEPEST = 1.13


def _case(shape: tuple[int, ...], note: str = "", x: Arg | None = None, bias: Arg | str | None = "", **kw: Any) -> Case:
    name = "x".join(map(str, shape)) + ("-" + note if note else "")
    return Case(name, {"x": x or Arg(shape), "bias": Arg(shape[-1:]) if isinstance(bias, str) else bias}, **kw)


_NONE = (
    *(_case((rows, width)) for rows, width in [(1, 1), (3, 2), (5, 17), (33, 64), (7, 129), (3, 1000), (2, 4099)]),
    _case((2, 16384), "wide", interpreted=False),
    _case((1031, 256), "many-rows", interpreted=False),
    _case((96,), "vector"),
    _case((0, 64), "empty"),
    _case((3, 0), "no-width"),
    _case((2, 3, 5, 40), "swapped", Arg((2, 3, 5, 40), "swapped"), cotangent="swapped"),
    _case((6, 100), "sliced", Arg((6, 100), "sliced"), Arg((100,), "offset"), cotangent="sliced"),
    _case((6, 100), "strided", Arg((6, 100), "strided"), Arg((100,), "strided"), cotangent="expanded"),
    _case((8, 256), "no-bias", bias=None),
    _case((8, 256), "frozen-bias", bias=Arg((256,), grad=False)),
    _case((8, 256), "frozen-input", Arg((8, 256), grad=False)),
    _case((8, 256), "bias-fp32", bias=Arg((256,), dtype=torch.float32)),
    _case((8, 256), "saturated", Arg((8, 256), values=saturated)),
    _case((8, 256), "cancels", Arg((8, 256), values=normal(1e-3, 300.0)), Arg((256,), values=normal(1e-3, -300.0))),
)


#: A width below four, of more than a block and of more than a tile; rows that are found by strides.
_DROPOUT = (
    dropped(_case((3, 2)), 0.5),
    dropped(_case((9, 1041)), 0.1),
    dropped(_case((3, 9001), "no-bias", bias=None), 0.9),
    dropped(_case((2, 3, 5, 40), "swapped", Arg((2, 3, 5, 40), "swapped"), cotangent="swapped"), 0.25),
    dropped(_case((0, 64), "empty"), 0.5),
    replace(dropped(_case((1031, 256), "many-rows"), 0.1), interpreted=False),
)
#: Of the cases above those of the activations that came later: they share all but the activation.
_SOME = (
    "1x1", "5x17", "7x129", "2x4099", "1031x256-many-rows", "0x64-empty", "2x3x5x40-swapped", "6x100-strided",
    "8x256-no-bias", "8x256-frozen-bias", "8x256-frozen-input", "8x256-bias-fp32", "8x256-saturated", "8x256-cancels",
)  # fmt: skip
_FEW = tuple(case for case in _NONE if case.id in _SOME)
_IN_BOTH = ("5x17", "3x1000", "2x3x5x40-swapped", "8x256-no-bias", "8x256-bias-fp32", "8x256-saturated")

CASES: dict[str, tuple[Case, ...]] = {
    "bias_gelu": (
        *_NONE,
        *(replace(c, id=c.id + "-tanh", options={"approximate": "tanh"}) for c in _NONE if c.id in _IN_BOTH),
        *_DROPOUT,
    ),
    "bias_silu": (*_FEW, *_DROPOUT[1:3]),
    "bias_relu": (*_FEW, *_DROPOUT[1:3]),
}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient sums (float64 inputs), by argument; what is left out has its own size.

    The derivative of GELU and SiLU is a sum that passes through 0, so a gradient may be far smaller than its terms.
    """
    dy = cotangents[0] / (1.0 - options.get("dropout_p", 0.0))
    if dy.numel() == 0:
        return {}
    over_rows = dy.reshape(-1, dy.shape[-1]).square().sum(0).sqrt().max()
    return {"x": _STEEPEST * float(dy.abs().max()), "bias": _STEEPEST * float(over_rows)}
