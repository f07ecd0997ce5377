"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.cross_entropy.cases import IGNORED
from foundry_kernels.ops.linear_cross_entropy.cases import linear_case
from foundry_kernels.testing import Case


def _case(*shape: Any, **options: Any) -> Case:
    """A case of linear_cross_entropy without its class weights."""
    made = linear_case(*shape, **options)
    return replace(made, args={name: arg for name, arg in made.args.items() if name != "class_weight"})


_RESULTS: dict[str, Any] = {"return_entropy": True, "return_lse": True}
_ALL: dict[str, Any] = {"softcap": 5.0, "logit_scale": 0.7, **_RESULTS}
_TILES: dict[str, Any] = {"chunk_size": "tiles"}

CASES: dict[str, tuple[Case, ...]] = {
    "linear_log_probs": (
        _case((3,), 4, 5, **_RESULTS),
        *(
            _case((rows,), width, n)
            for rows, width, n in [(1, 1, 1), (4, 8, 9), (7, 16, 33), (130, 8, 67), (9, 24, 129)]
        ),
        _case((200,), 32, 1031, "all", **_RESULTS),
        _case((12,), 8, 50, "chunks", chunk_size=5),
        _case((12,), 8, 50, "one-by-one", chunk_size=1, **_RESULTS),
        _case((2, 3, 5), 8, 40, "4d", **_RESULTS),
        *(
            _case((2, 3, 5), 8, 40, layout, hidden=layout, cotangent="strided", **_RESULTS)
            for layout in ("swapped", "sliced", "offset", "expanded", "strided")
        ),
        _case((0,), 8, 40, "empty", **_RESULTS),
        _case((12,), 8, 50, "bias", bias=True, ignored=0.3),
        *(_case((12,), 8, 50, "frozen-" + name, frozen=(name,), **_RESULTS) for name in ("hidden", "weight")),
        _case((12,), 8, 50, "frozen-both", frozen=("hidden", "weight"), bias=True),
        _case((12,), 8, 50, "entropy", return_entropy=True, ignored=0.2),
        _case((12,), 8, 50, "lse", return_lse=True, ignored=0.2),
        _case((40,), 8, 50, "ignored", ignored=0.4, chunk_size=7, **_RESULTS),
        _case((12,), 8, 50, "all-ignored", ignored=1.0, **_RESULTS),
        _case((12,), 8, 5, "ignore-index-0", ignore_index=0, **_RESULTS),
        _case((12,), 8, 50, "everything", bias=True, ignored=0.2, chunk_size=5, **_ALL),
        _case((12,), 8, 50, "large", std=60.0, **_RESULTS),
        _case((12,), 8, 50, "tiles", **_TILES),
        _case((70,), 40, 131, "tiles", ignored=0.2, **_TILES, **_RESULTS),
        _case(
            (2, 6), 8, 50, "tiles-everything", "strided", bias=True, cotangent="strided", ignored=0.2, **_TILES, **_ALL
        ),
        *(_case((12,), 8, 50, f"tiles-frozen-{name}", frozen=(name,), **_TILES) for name in ("hidden", "weight")),
        _case((3,), 4, 1, "tiles", **_TILES, **_RESULTS),
        _case((12,), 8, 50, "tiles-all-ignored", ignored=1.0, **_TILES, **_RESULTS),
        _case((0,), 8, 40, "tiles-empty", **_TILES),
        _case((12,), 8, 50, "tiles-large", std=60.0, **_TILES, **_RESULTS),
        _case((3,), 4, 70000, "tiles-of-blocks", return_entropy=True, **_TILES),  # several of them on any backend
        _case((40,), 8, 50, "one-chunk", ignored=0.2, chunk_size=40, **_RESULTS),
    ),
}


def scales(
    args: Mapping[str, Tensor | None], options: Mapping[str, Any], cotangents: tuple[Tensor, ...]
) -> dict[str, float]:
    """Size of the terms that a gradient or a result sums (float64 inputs), by argument.

    A logit sums products, and each result is a difference of logits: it is as exact as they are.
    """
    hidden, weight, target = args["hidden"], args["weight"], args["target"]
    assert hidden is not None
    assert weight is not None
    assert target is not None
    if not (target != options.get("ignore_index", IGNORED)).any():
        return {}
    x, w = hidden.detach().reshape(-1, hidden.shape[-1]).abs(), weight.detach().abs()
    logits = float((x @ w.t()).max())
    dlogits = abs(options.get("logit_scale", 1.0)) * sum(float(c.abs().max()) for c in cotangents if c.numel())
    found = {f"output {i}": logits for i in range(len(cotangents))}
    return found | {"hidden": 2 * dlogits * float(w.max()), "weight": dlogits * float(x.max())}


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: of all classes, and of several blocks."""
    kinds = (
        _case((64,), 16, 32000),
        _case((64,), 16, 32000, **_ALL),
        _case((64,), 16, 70000, **_TILES),
        _case((64,), 16, 70000, **_TILES, **_ALL),
    )
    return tuple((case, dtype) for case in kinds for dtype in (torch.bfloat16, torch.float32))
