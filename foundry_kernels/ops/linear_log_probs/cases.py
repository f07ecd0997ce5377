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
from foundry_kernels.testing import Case

_RESULTS: dict[str, Any] = {"return_entropy": True, "return_lse": True, "return_stats": True}
_ALL: dict[str, Any] = {"softcap": 5.0, "logit_scale": 0.7, **_RESULTS}
_TILES: dict[str, Any] = {"chunk_size": "tiles"}

CASES: dict[str, tuple[Case, ...]] = {
    "linear_log_probs": (
        *common_cases(linear_case, _RESULTS, _RESULTS),
        *tiles_cases(_RESULTS),
        linear_case((3,), 4, 5, **_RESULTS),
        linear_case((200,), 32, 1031, "all", **_RESULTS),
        linear_case((12,), 8, 50, "one-by-one", chunk_size=1, **_RESULTS),
        linear_case((12,), 8, 50, "entropy", return_entropy=True, ignored=0.2),
        linear_case((12,), 8, 50, "lse", return_lse=True, ignored=0.2),
        linear_case((60,), 8, 3, "stats", return_stats=True, ignored=0.2, chunk_size=7),
        linear_case((60,), 8, 9, "stats", return_stats=True, ignored=0.2, **_TILES),
        linear_case((12,), 8, 50, "everything", bias=True, ignored=0.2, chunk_size=5, **_ALL),
        linear_case((12,), 8, 50, "large", std=60.0, **_RESULTS),
        linear_case((12,), 8, 50, "tiles-alone", **_TILES),
        linear_case(
            (2, 6), 8, 50, "tiles-everything", "strided", bias=True, cotangent="strided", ignored=0.2, **_TILES, **_ALL
        ),
        linear_case((3,), 4, 70000, "tiles-of-blocks", return_entropy=True, **_TILES),  # several of them on any backend
    ),
}

SAVED = {"linear_log_probs": Saved(outputs=(1, 2), per_row={"hidden": 2}, more=of_few, made=of_few)}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient or a result sums (float64 inputs), by argument.

    A logit sums products, and each result is a difference of logits: it is as exact as they are.
    """
    sizes = magnitudes(args, options)
    if sizes is None:
        return {}
    logits, x, w = sizes
    dlogits = abs(options.get("logit_scale", 1.0)) * sum(float(c.abs().max()) for c in cotangents if c.numel())
    found = {f"output {i}": logits for i in range(len(cotangents))}
    return found | {"hidden": 2 * dlogits * w, "weight": dlogits * x} | gradients_of_pair(args, dlogits)


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: of all classes, and of several blocks."""
    kinds = (
        linear_case((64,), 16, 32000),
        linear_case((64,), 16, 32000, **_ALL),
        linear_case((64,), 16, 70000, **_TILES),
        linear_case((64,), 16, 70000, **_TILES, **_ALL),
    )
    return tuple((case, dtype) for case in kinds for dtype in (torch.bfloat16, torch.float32))
