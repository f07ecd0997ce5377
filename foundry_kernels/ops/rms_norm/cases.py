"""Sample inputs, and the size of what a gradient sums; the parity suite enumerates this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.core.dropout import dropout
from foundry_kernels.testing import Arg, Case, normal


def _one_large(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Normal rows with one entry of 1e4: the sum of squares is one term."""
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x[..., shape[-1] // 3] = 1e4
    return x


def _case(shape: tuple[int, ...], note: str = "", *, x: Arg | None = None, w: Arg | str | None = "", **kw: Any) -> Case:
    weight = Arg((shape[-1],), values=normal(0.3, 1.0)) if isinstance(w, str) else w
    options = {"eps": 1e-6, **kw.pop("options", {})}
    name = "x".join(map(str, shape)) + ("-" + note if note else "")
    return Case(name, {"x": x or Arg(shape), "weight": weight}, options, **kw)


_RMS_NORM = (
    *(_case((rows, width)) for rows, width in [(1, 1), (3, 2), (5, 17), (33, 64), (64, 127), (17, 128), (7, 129)]),
    *(_case((rows, width)) for rows, width in [(9, 1000), (4, 4096), (3, 5120), (2, 8191), (2, 16384)]),
    _case((2, 40000), "wide", interpreted=True),
    _case((1031, 256), "many-rows", interpreted=False),
    _case((300, 2048), "threads", interpreted=False),
    _case((96,), "vector"),
    _case((0, 64), "empty"),
    _case((2, 0, 64), "empty-3d"),
    _case((2, 3, 5, 40), "4d"),
    _case((2, 3, 5, 40), "swapped", x=Arg((2, 3, 5, 40), "swapped"), cotangent="swapped"),
    _case((2, 3, 2, 2, 24), "swapped-5d", x=Arg((2, 3, 2, 2, 24), "swapped"), cotangent="offset"),
    _case((6, 100), "sliced", x=Arg((6, 100), "sliced"), cotangent="sliced"),
    _case((6, 100), "offset", x=Arg((6, 100), "offset"), w=Arg((100,), "offset"), cotangent="offset"),
    _case((6, 100), "strided", x=Arg((6, 100), "strided"), w=Arg((100,), "strided"), cotangent="strided"),
    _case((6, 100), "expanded", x=Arg((6, 100), "expanded"), cotangent="expanded"),
    _case((8, 256), "no-weight", w=None),
    _case((8, 256), "frozen-weight", w=Arg((256,), grad=False)),
    _case((8, 256), "frozen-input", x=Arg((8, 256), grad=False)),
    _case((8, 256), "weight-fp32", w=Arg((256,), dtype=torch.float32)),
    _case((8, 256), "gemma", w=Arg((256,), values=normal(0.3)), options={"weight_offset": 1.0}),
    _case((8, 256), "llama", options={"round_before_weight": True}),
    _case((8, 256), "llama-fp32-weight", w=Arg((256,), dtype=torch.float32), options={"round_before_weight": True}),
    _case((8, 256), "llama-no-weight", w=None, options={"round_before_weight": True}),
    _case((2, 3, 5, 40), "several-dims", w=Arg((5, 40)), options={"normalized_shape": (5, 40), "eps": None}),
    _case((3, 6, 64), "several-dims-no-weight", w=None, options={"normalized_shape": (6, 64), "weight_offset": 1.0}),
    _case((8, 256), "large", x=Arg((8, 256), values=normal(1e4))),
    _case((8, 256), "small", x=Arg((8, 256), values=normal(1e-4))),
    _case((8, 256), "small-eps0", x=Arg((8, 256), values=normal(1e-2)), options={"eps": 0.0}),
    _case((8, 256), "zero", x=Arg((8, 256), values=normal(0.0))),
    _case((8, 256), "one-large", x=Arg((8, 256), values=_one_large)),
)


def _constant(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Rows of one value each: what is left of them around their mean is nothing."""
    return torch.randn((*shape[:-1], 1), generator=g, dtype=torch.float64).expand(shape)


def _layer(shape: tuple[int, ...], note: str = "", *, b: Arg | str | None = "", **kw: Any) -> Case:
    """Returns what `_case` does, with a bias."""
    case = _case(shape, note, **{**kw, "options": {"eps": 1e-5, **kw.get("options", {})}})
    bias = Arg((shape[-1],), values=normal(0.5)) if isinstance(b, str) else b
    return replace(case, args={**case.args, "bias": bias})


_LAYER_NORM = (
    *(_layer((rows, width)) for rows, width in [(1, 1), (3, 2), (5, 17), (33, 64), (7, 129), (9, 1000), (3, 5120)]),
    _layer((2, 16384), "two-reads", interpreted=False),
    _layer((2, 20011), "wide", interpreted=False),
    _layer((1, 16411), "wide-frozen", w=Arg((16411,), grad=False), b=Arg((16411,), grad=False)),
    _layer((300, 2048), "threads", interpreted=False),
    _layer((96,), "vector"),
    _layer((0, 64), "empty"),
    _layer((2, 3, 5, 40), "swapped", x=Arg((2, 3, 5, 40), "swapped"), cotangent="swapped"),
    _layer((6, 100), "sliced", x=Arg((6, 100), "sliced"), w=Arg((100,), "offset"), cotangent="sliced"),
    _layer((6, 100), "strided", x=Arg((6, 100), "strided"), b=Arg((100,), "strided"), cotangent="expanded"),
    _layer((8, 256), "no-bias", b=None),
    _layer((8, 256), "no-weight", w=None),
    _layer((8, 256), "plain", w=None, b=None),
    _layer((8, 256), "frozen-weight", w=Arg((256,), grad=False)),
    _layer((8, 256), "frozen-bias", b=Arg((256,), grad=False)),
    _layer((8, 256), "frozen-input", x=Arg((8, 256), grad=False)),
    _layer((8, 256), "fp32-weight-half-bias", w=Arg((256,), dtype=torch.float32), b=Arg((256,), dtype=torch.float16)),
    # What a difference of squares, or of sums that are not about the mean, loses:
    _layer((64, 256), "far-mean", x=Arg((64, 256), values=normal(1.0, 1e4))),
    _layer((8, 5003), "far-mean-wide", x=Arg((8, 5003), values=normal(1.0, 1e4))),
    _layer((8, 256), "constant", x=Arg((8, 256), values=_constant)),
    _layer((8, 256), "one-large", x=Arg((8, 256), values=_one_large)),
    _layer((8, 256), "small-eps0", x=Arg((8, 256), values=normal(1e-2)), options={"eps": 0.0}),
)


def _with_residual(case: Case) -> Case:
    (x,) = case.given("x")
    vectors = {name: arg for name, arg in case.args.items() if name != "x"}
    return replace(case, args={"x": x, "residual": x, **vectors})


#: The probabilities of cases with dropout, by their ids without it.
_DROPOUT = {
    "5x17": 0.5,
    "9x1000": 0.1,
    "2x40000-wide": 0.9,
    "300x2048-threads": 0.1,
    "0x64-empty": 0.5,
    "2x3x2x2x24-swapped-5d": 0.5,
    "8x256-llama-fp32-weight": 0.1,
    "8x256-frozen-input": 0.5,
}
_LAYER_DROPOUT = {"3x2": 0.5, "9x1000": 0.9, "1x16411-wide-frozen": 0.1, "300x2048-threads": 0.1, "8x256-plain": 0.5}


def _dropped(case: Case, p: float) -> Case:
    options = {**case.options, "dropout_p": p, "dropout_seed": 0x123456789ABCDEF}
    return replace(case, id=f"{case.id}-dropout", options=options)


def _with_dropout(cases: tuple[Case, ...], p: Mapping[str, float]) -> tuple[Case, ...]:
    """The cases that `p` names, with a residual and dropout. Wide ones take the interpreter seconds each;
    tests/ops/test_dropout.py has one."""
    named = (_dropped(_with_residual(case), p[case.id]) for case in cases if case.id in p)
    return tuple(replace(case, interpreted=case.interpreted and "wide" not in case.id) for case in named)


_FROZEN_X = Case("6x64-frozen-x", {"x": Arg((6, 64), grad=False), "residual": Arg((6, 64)), "weight": Arg((64,))})
_RESIDUAL_FP32 = Case(
    "6x64-residual-fp32", {"x": Arg((6, 64)), "residual": Arg((6, 64), dtype=torch.float32), "weight": Arg((64,))}
)

_IN_BOTH = (
    "3x2", "9x1000", "2x20011", "1x16411", "300x2048-threads", "0x64-empty", "8x256-plain", "8x256-small-eps0",
    "64x256-far-mean",
)  # fmt: skip


CASES: dict[str, tuple[Case, ...]] = {
    "rms_norm": _RMS_NORM,
    "add_rms_norm": (
        *map(_with_residual, _RMS_NORM),
        Case(
            "2x3x5x40-mixed-layouts",
            {"x": Arg((2, 3, 5, 40), "swapped"), "residual": Arg((2, 3, 5, 40)), "weight": Arg((40,))},
        ),
        _FROZEN_X,
        _RESIDUAL_FP32,
        *_with_dropout(_RMS_NORM, _DROPOUT),
        _dropped(_FROZEN_X, 0.5),
        _dropped(_RESIDUAL_FP32, 0.1),
    ),
    "layer_norm": _LAYER_NORM,
    "add_layer_norm": (
        *(_with_residual(case) for case in _LAYER_NORM if case.id.startswith(_IN_BOTH)),
        Case(
            "2x3x5x40-mixed-layouts",
            {"x": Arg((2, 3, 5, 40), "swapped"), "residual": Arg((2, 3, 5, 40)), "bias": Arg((40,))},
        ),
        _FROZEN_X,
        *_with_dropout(_LAYER_NORM, _LAYER_DROPOUT),
    ),
}


def _wide_sum(args: Tensors, options: Options) -> int:
    """The factors of dropout before a residual of another dtype, which PyTorch multiplies by."""
    x, residual = args["x"], args["residual"]
    return x.numel() + x[..., 0].numel() if x.dtype != residual.dtype else 0


SAVED = {
    "rms_norm": Saved(per_row={"x": 1}),
    "add_rms_norm": Saved(outputs=(1,), never=("x", "residual"), per_row={"x": 1}, more=_wide_sum),
    "layer_norm": Saved(per_row={"x": 2}),
    "add_layer_norm": Saved(outputs=(1,), never=("x", "residual"), per_row={"x": 2}, more=_wide_sum),
}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient sums (float64 inputs), by argument; what is left out has its own size."""
    x, weight = args["x"], args.get("weight")
    p = options.get("dropout_p", 0.0)
    if p:
        x = dropout(x, p, torch.tensor(options["dropout_seed"], device=x.device))
    if "residual" in args:
        residual = args["residual"]
        x = x + residual
    if x.numel() == 0:
        return {}
    dims = len(options.get("normalized_shape", (0,)))
    x, cotangents = x.flatten(-dims), tuple(c.flatten(-dims) for c in cotangents)
    weight = None if weight is None else weight.flatten()
    centered = "bias" in args
    if centered:
        x = x - x.mean(-1, keepdim=True)
    eps = options.get("eps", 1e-5 if centered else None) or 0.0  # that of None is as small as rounding
    rstd = (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    terms = cotangents[0] * x * rstd
    w = 1.0 if weight is None else weight + options.get("weight_offset", 0.0)
    into = float((cotangents[0] * w * rstd).abs().max())
    if len(cotangents) > 1:
        into = max(into, float(cotangents[1].abs().max()))
    return {"x": into / (1.0 - p), "residual": into, "weight": _over_rows(terms), "bias": _over_rows(cotangents[0])}


def _over_rows(terms: Tensor) -> float:
    return float(terms.reshape(-1, terms.shape[-1]).square().sum(0).sqrt().max())
