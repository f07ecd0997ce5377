"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.ops._linear_loss.cases import (
    common_cases,
    gradients_of_pair,
    linear_case,
    magnitudes,
    of_few,
    tiles_cases,
)
from foundry_kernels.ops.cross_entropy.cases import IGNORED, scaled
from foundry_kernels.testing import Case

_NONE: dict[str, Any] = {"reduction": "none"}
_PREDICTIONS: dict[str, Any] = {"return_token_accuracy": True, "return_predicted_tokens": True}
_ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-2, "softcap": 5.0, "logit_scale": 0.7}

_TILES: dict[str, Any] = {"chunk_size": "tiles"}
_WITH: dict[str, Any] = _ALL | {
    "class_weight": True, "bias": True, "ignored": 0.2, "return_lse": True, "return_z_loss": True
}  # fmt: skip

CASES: dict[str, tuple[Case, ...]] = {
    "linear_cross_entropy": (
        *common_cases(linear_case, {}, _NONE),
        *tiles_cases({}),
        linear_case((3,), 4, 5, "z-loss", z_loss=1e-2),
        linear_case((200,), 32, 1031),
        linear_case((12,), 8, 50, "chunks-none", chunk_size=5, **_NONE),
        linear_case((12,), 8, 50, "one-by-one", chunk_size=1, reduction="sum"),
        linear_case((2, 0), 8, 40, "empty-none", **_NONE),
        linear_case((12,), 8, 50, "bias-none", bias=True, ignored=0.3, **_NONE),
        *(linear_case((12,), 8, 50, f"frozen-{name}-none", frozen=(name,), **_NONE) for name in ("hidden", "weight")),
        linear_case((40,), 8, 50, "ignored-none", ignored=0.4, chunk_size=7, **_NONE),
        linear_case((12,), 8, 50, "all-ignored-none", ignored=1.0, **_NONE),
        linear_case((12,), 8, 50, "class-weight", class_weight=True, ignored=0.2),
        linear_case((12,), 8, 50, "everything", class_weight=True, bias=True, ignored=0.2, chunk_size=5, **_ALL),
        linear_case(
            (12,), 8, 50, "everything-none", class_weight=True, bias=True, ignored=0.2, chunk_size=5, **_ALL, **_NONE
        ),
        linear_case((12,), 8, 50, "lse", return_lse=True, ignored=0.2),
        linear_case((12,), 8, 50, "lse-and-z-loss", return_lse=True, return_z_loss=True, z_loss=1e-2, ignored=0.2),
        linear_case((12,), 8, 50, "lse-none", return_lse=True, return_z_loss=True, z_loss=1e-2, ignored=0.2, **_NONE),
        linear_case((12,), 8, 50, "large", std=60.0),
        *(
            linear_case((40,), 8, 50, f"scaling-{note}", ignored=0.3, chunk_size=size, token_scaling=True, **options)
            for size, kind in ((7, "chunks"), ("tiles", "tiles"))
            for note, options in (
                (kind, {}),
                (f"{kind}-none", {"bias": True, **_NONE, **_ALL}),
                (f"{kind}-sum", {"reduction": "sum", "return_z_loss": True, "class_weight": True, **_ALL}),
            )
        ),
        *(
            linear_case((40,), 8, 50, f"predictions-{kind}", ignored=0.3, chunk_size=size, **_PREDICTIONS)
            for size, kind in ((7, "chunks"), ("tiles", "tiles"))
        ),
        linear_case((2, 6), 8, 50, "predictions-tiles-none", bias=True, ignored=0.2, **_PREDICTIONS, **_TILES, **_NONE),
        linear_case((0,), 8, 40, "predictions-empty", token_scaling=True, **_PREDICTIONS, **_TILES),
        linear_case((12,), 8, 50, "predictions-all-ignored", ignored=1.0, token_scaling=True, **_PREDICTIONS),
        linear_case((12,), 8, 50, "tiles-none", bias=True, ignored=0.3, **_TILES, **_NONE),
        linear_case((2, 6), 8, 50, "tiles-everything", **_WITH, **_TILES),
        linear_case((2, 6), 8, 50, "tiles-everything-none", "strided", cotangent="strided", **_WITH, **_TILES, **_NONE),
        linear_case((12,), 8, 50, "tiles-smoothing", label_smoothing=0.1, reduction="sum", **_TILES),
        linear_case((3,), 4, 70000, "tiles-of-blocks", label_smoothing=0.1, **_TILES),  # several of them on any backend
        linear_case((12,), 8, 50, "one-chunk-everything", **_WITH, chunk_size=1000),
    ),
}

SAVED = {
    "linear_cross_entropy": Saved(
        outputs=(1,),
        per_row={"hidden": 2},
        gradients=("hidden", "weight", "bias"),
        made=of_few,
        more=lambda args, options: scaled(args, options) + of_few(args, options),
    )
}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient or the loss sums (float64 inputs), by argument.

    A logit sums products, and the loss is a difference of logits: it is as exact as they are.
    """
    sizes, target, class_weight = magnitudes(args, options), args["target"], args.get("class_weight")
    if sizes is None:
        return {}
    logits, x, w = sizes
    counts = target != options.get("ignore_index", IGNORED)
    found = {"output 0": logits, "output 1": logits}
    ones = torch.ones(counts.shape, dtype=torch.float64, device=target.device)
    of_target = ones if class_weight is None else class_weight[torch.where(counts, target, 0).long()]
    largest = float((of_target * counts).max()) * abs(options.get("logit_scale", 1.0))
    if options.get("reduction", "mean") == "mean":
        largest /= max(float((of_target * counts).sum()), 1e-30)
    dlogits = largest * float(cotangents[0].abs().max())
    if options.get("return_lse"):
        dlogits += abs(options.get("logit_scale", 1.0)) * float(cotangents[1].abs().max())
    return found | {"hidden": 2 * dlogits * w, "weight": dlogits * x} | gradients_of_pair(args, dlogits)


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: of all classes, gradients at once or later, and of several blocks."""
    kinds = (
        linear_case((64,), 16, 32000),
        linear_case((64,), 16, 32000, **_ALL, **_NONE),
        linear_case((64,), 16, 50257),
        linear_case((64,), 16, 70000, **_TILES),
        linear_case((64,), 16, 70000, **_WITH, **_TILES, **_NONE),
    )
    return tuple((case, dtype) for case in kinds for dtype in (torch.bfloat16, torch.float32))
