"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.testing import Arg, Case, Values, normal

IGNORED = -100


@dataclass(frozen=True)
class _Targets:
    """Classes 0 .. n_classes - 1, the first and the last among them, and some ignored tokens."""

    n_classes: int
    ignored: float

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        found = torch.randint(self.n_classes, shape, generator=g).double()
        flat = found.view(-1)
        flat[:1], flat[1:2] = self.n_classes - 1, 0
        return torch.where(torch.rand(shape, generator=g) < self.ignored, float(IGNORED), found)


def targets(n_classes: int, ignored: float = 0.0) -> Values:
    return _Targets(n_classes, ignored)


def class_weights(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Weights around 1, one in eight of them 0."""
    return torch.where(torch.rand(shape, generator=g) < 0.125, 0.0, torch.rand(shape, generator=g) + 0.5).double()


@dataclass(frozen=True)
class _Shifted:
    """Normal values around `mean`, with an outlier a row that is `peak` larger."""

    mean: float
    peak: float

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        x = torch.randn(shape, generator=g, dtype=torch.float64) + self.mean
        at = torch.randint(shape[-1], (*shape[:-1], 1), generator=g)
        return x.scatter_add(-1, at, x.new_full(at.shape, self.peak))


def shifted(mean: float, peak: float) -> Values:
    return _Shifted(mean, peak)


def masked(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Normal values; classes that are ruled out have minus infinity."""
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    return x.masked_fill(torch.rand(shape, generator=g) < 0.3, -math.inf)


def _case(
    shape: tuple[int, ...],
    note: str = "",
    logits: Arg | None = None,
    ignored: float = 0.0,
    weighted: torch.dtype | bool = False,
    cotangent: str = "contiguous",
    integers: torch.dtype = torch.int64,
    **options: Any,
) -> Case:
    name = "x".join(map(str, shape)) + ("-" + note if note else "")
    weight = None
    if weighted:
        weight = Arg(shape[-1:], values=class_weights, dtype=None if weighted is True else weighted, grad=False)
    target = Arg(shape[:-1], values=targets(shape[-1], ignored), dtype=integers, grad=False)
    return Case(name, {"logits": logits or Arg(shape), "target": target, "weight": weight}, options, cotangent)


def _values(shape: tuple[int, ...], note: str, values: Values, **options: Any) -> Case:
    return _case(shape, note, Arg(shape, values=values), **options)


_NONE: dict[str, Any] = {"reduction": "none"}
_PREDICTIONS: dict[str, Any] = {"return_token_accuracy": True, "return_predicted_tokens": True}
_ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 15.0}

CASES: dict[str, tuple[Case, ...]] = {
    "cross_entropy": (
        *(_case((rows, n)) for rows, n in [(1, 1), (1, 17), (4, 8), (5, 17), (7, 64), (33, 127), (9, 128), (7, 129)]),
        *(_case((rows, n)) for rows, n in [(3, 1009), (5, 1023), (4, 1025), (2, 2053), (3, 4099), (1, 32003)]),
        replace(_case((513, 1031), "threads"), interpreted=False),
        replace(_case((67, 32000), "vocabulary", ignored=0.1), interpreted=False),
        _case((6,), "one-token"),
        _case((9, 128), "int32", integers=torch.int32),
        _case((0, 64), "empty", **_NONE),
        _case((0, 64), "empty-mean"),
        _case((2, 0, 64), "empty-sum", reduction="sum"),
        *(_case((5, 17), r, reduction=r) for r in ("none", "sum")),
        _case((2, 3, 5, 40), "4d"),
        _case((2, 3, 5, 40), "4d-none", **_NONE),
        *(
            _case((2, 3, 5, 40), layout, Arg((2, 3, 5, 40), layout), cotangent="strided", **_NONE)
            for layout in ("swapped", "sliced", "offset", "expanded", "strided")
        ),
        _case((12, 50), "ignored", ignored=0.4),
        _case((12, 50), "ignored-none", ignored=0.4, **_NONE),
        _case((12, 50), "all-ignored", ignored=1.0),
        _case((12, 50), "all-ignored-sum", ignored=1.0, reduction="sum", **_ALL),
        _case((12, 50), "ignore-index-0", ignore_index=0),
        _case((12, 50), "weighted", weighted=True, ignored=0.2),
        _case((12, 50), "weighted-float32-none", weighted=torch.float32, **_NONE),
        _case((12, 50), "smoothing", label_smoothing=0.1, ignored=0.2),
        _case((12, 50), "smoothing-1", label_smoothing=1.0),
        _case((3, 1), "smoothing", label_smoothing=0.1),
        _case((12, 50), "weighted-smoothing", label_smoothing=0.2, weighted=True),
        _case((7, 2100), "weighted-smoothing-none", label_smoothing=0.2, weighted=True, **_NONE),
        _case((12, 50), "z-loss", z_loss=1e-2, ignored=0.2),
        _case((12, 50), "weighted-z-loss", z_loss=1e-2, weighted=True),
        _case((12, 50), "softcap", softcap=2.0),
        _values((8, 300), "softcap-saturated", normal(100.0), softcap=15.0),
        _case((12, 50), "everything", weighted=True, ignored=0.2, **_ALL),
        _case((4, 2100), "everything-none", weighted=True, ignored=0.2, **_ALL, **_NONE),
        _case((12, 50), "lse", return_lse=True, ignored=0.2),
        _case((12, 50), "lse-and-z-loss", return_lse=True, return_z_loss=True, z_loss=1e-2, ignored=0.2),
        _case((12, 50), "z-loss-none", return_z_loss=True, z_loss=1e-2, ignored=0.2, **_NONE),
        _case((12, 50), "token-scaling", token_scaling=True, ignored=0.2),
        _case((12, 50), "token-scaling-none", token_scaling=True, weighted=True, ignored=0.2, **_ALL, **_NONE),
        _case((12, 50), "token-scaling-z-loss", token_scaling=True, return_lse=True, return_z_loss=True, **_ALL),
        _case((12, 50), "token-scaling-all-ignored", token_scaling=True, ignored=1.0),
        _case((0, 64), "token-scaling-empty", token_scaling=True, **_PREDICTIONS),
        _case((12, 50), "predictions", ignored=0.2, **_PREDICTIONS),
        _case((2, 3, 50), "predictions-none", ignored=0.2, return_lse=True, **_PREDICTIONS, **_NONE),
        _values((8, 300), "predictions-softcap", normal(60.0), softcap=15.0, **_PREDICTIONS),
        _values((8, 300), "confident", shifted(0.0, 30.0)),
        _values((8, 300), "confident-none", shifted(0.0, 30.0), **_NONE),
        _values((8, 300), "large", normal(60.0)),
        _values((8, 300), "huge", normal(1e4), **_NONE),
        _values((8, 300), "far-up", shifted(1e4, 0.0), **_NONE),
        _values((8, 300), "far-down", shifted(-1e4, 0.0), **_NONE),
        _values((8, 300), "far-up-smoothing", shifted(1e4, 0.0), label_smoothing=0.1),
        _values((8, 300), "small", normal(1e-4)),
        _values((8, 300), "equal", normal(0.0)),
        _values((8, 300), "ruled-out", masked),
    ),
}


def scaled(args: Tensors, options: Options) -> int:
    """With `token_scaling` a number for each token."""
    found = next(x for name, x in args.items() if x is not None)
    return found[..., 0].numel() if options.get("token_scaling") else 0


SAVED = {"cross_entropy": Saved(outputs=(1,), per_row={"logits": 2}, more=scaled)}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient sums (float64 inputs), by argument; what is left out has its own size.

    The target's p - 1 passes through 0 for a confident token.
    """
    target, weight = args["target"], args.get("weight")  # which a timed case does not name
    counts = target != options.get("ignore_index", IGNORED)
    if not counts.any():
        return {}
    weights = torch.ones_like(counts, dtype=torch.float64) if weight is None else weight[target.where(counts, 0).long()]
    largest = float((weights * counts).max())
    if options.get("reduction", "mean") == "mean":
        largest /= max(float((weights * counts).sum()), 1e-30)
    return {"logits": largest * float(cotangents[0].abs().max())}


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: the benchmarks' shapes, and each option on wide and narrow rows."""
    varied = [
        _case((8192, n), reduction, weighted=weighted, reduction=reduction, return_lse=True, **options)
        for n in (40, 300, 32000)
        for options in ({}, {"label_smoothing": 0.1}, {"softcap": 15.0}, _ALL)
        for weighted, reduction in ((False, "mean"), (True, "none"))
    ]
    timed = [_case((8192, n)) for n in (32000, 50257, 128256)]
    return (
        *((case, dtype) for case in timed for dtype in (torch.bfloat16, torch.float32)),
        *((case, torch.bfloat16) for case in varied),
    )
