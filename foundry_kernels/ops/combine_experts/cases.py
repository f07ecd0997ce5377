"""Sample inputs, and the size of what a gradient sums; the parity suite enumerates this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Scales, Tensors
from foundry_kernels.testing import Arg, Case, normal


@dataclass(frozen=True)
class _Slots:
    """Rows 0 .. rows - 1 in random order, each once at most, and -1 in the rest of the slots."""

    rows: int

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        found = torch.full((torch.Size(shape).numel(),), -1.0, dtype=torch.float64)
        n = min(self.rows, found.numel())
        found[torch.randperm(found.numel(), generator=g)[:n]] = torch.randperm(self.rows, generator=g)[:n].double()
        return found.view(shape)


def slots(tokens: int, k: int, rows: int, layout: str = "contiguous", dtype: torch.dtype = torch.int32) -> Arg:
    return Arg((tokens, k), layout, _Slots(rows), dtype, grad=False)


_FP32 = torch.float32


def _case(
    tokens: int,
    k: int,
    width: int,
    note: str = "",
    rows: int | None = None,
    weights: Arg | str | None = "",
    x: Arg | None = None,
    **kw: Any,
) -> Case:
    """`rows` of x: fewer than slots leave some of these without a row; more are in no sum."""
    rows = tokens * k if rows is None else rows
    args = {
        "x": x or Arg((rows, width)),
        "weights": Arg((tokens, k), dtype=_FP32) if isinstance(weights, str) else weights,
        "slots": slots(tokens, k, rows, kw.pop("slot_layout", "contiguous"), kw.pop("integers", torch.int32)),
    }
    name = f"T={tokens} k={k} D={width}" + (f" M={rows}" if rows != tokens * k else "") + ("-" + note if note else "")
    return Case(name, args, **kw)


CASES: dict[str, tuple[Case, ...]] = {
    "combine_experts": (
        _case(1, 1, 1),
        _case(3, 2, 5),
        _case(7, 2, 64, rows=9),
        _case(5, 3, 17, rows=40),
        _case(9, 8, 48),
        _case(4, 1, 130),
        _case(33, 2, 40, "many-tokens"),
        _case(3, 2, 1030, "wide"),
        _case(6, 4, 16, "no-rows", rows=0),
        _case(0, 2, 16, "no-tokens", rows=3),
        _case(3, 2, 0, "no-width"),
        _case(6, 2, 32, "unweighted", weights=None),
        _case(6, 2, 24, "unweighted-some", rows=8, weights=None, cotangent="strided"),
        _case(6, 2, 32, "weights-of-its-dtype", weights=Arg((6, 2))),
        _case(6, 2, 32, "int64", integers=torch.int64),
        _case(6, 2, 32, "frozen-input", x=Arg((12, 32), grad=False)),
        _case(6, 2, 32, "frozen-weights", weights=Arg((6, 2), dtype=_FP32, grad=False)),
        _case(6, 3, 40, "sliced", x=Arg((18, 40), "sliced"), weights=Arg((6, 3), "sliced", dtype=_FP32)),
        _case(6, 3, 40, "strided", x=Arg((18, 40), "strided"), slot_layout="strided", cotangent="expanded"),
        _case(6, 3, 40, "offset", x=Arg((18, 40), "offset"), weights=Arg((6, 3), "strided"), cotangent="offset"),
        _case(6, 4, 32, "cancels", x=Arg((24, 32), values=normal(1e-3, 300.0))),
        _case(1031, 4, 264, "large", rows=4000, interpreted=False),
    )
}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that are summed (float64 inputs): the root of the sum of their squares."""
    x, weights, slots = args["x"], args["weights"], args["slots"]
    if x.numel() == 0 or slots.numel() == 0:
        return {}
    some = (slots >= 0).unsqueeze(-1)
    rows = torch.where(some, x[slots.clamp_min(0).long()], 0.0)
    weighted = rows if weights is None else rows * weights.unsqueeze(-1)
    products = rows * cotangents[0].unsqueeze(1)
    return {
        "output 0": float(weighted.square().sum(1).max().sqrt()),
        "weights": float(products.square().sum(-1).max().sqrt()),
    }
