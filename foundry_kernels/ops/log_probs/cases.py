"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.ops.cross_entropy.cases import IGNORED, masked, shifted, targets
from foundry_kernels.testing import Arg, Case, Values, normal


def _case(
    shape: tuple[int, ...],
    note: str = "",
    logits: Arg | None = None,
    ignored: float = 0.0,
    integers: torch.dtype = torch.int64,
    cotangent: str = "contiguous",
    **options: Any,
) -> Case:
    name = "x".join(map(str, shape)) + ("-" + note if note else "")
    target = Arg(shape[:-1], values=targets(shape[-1], ignored), dtype=integers, grad=False)
    return Case(name, {"logits": logits or Arg(shape), "target": target}, options, cotangent)


def _values(shape: tuple[int, ...], note: str, values: Values, **options: Any) -> Case:
    return _case(shape, note, Arg(shape, values=values), **options)


_ALL: dict[str, Any] = {"return_entropy": True, "return_lse": True, "return_stats": True}

CASES: dict[str, tuple[Case, ...]] = {
    "log_probs": (
        *(_case((rows, n)) for rows, n in [(1, 1), (1, 17), (5, 17), (7, 64), (33, 127), (9, 128), (3, 1009)]),
        *(_case((rows, n), "all", **_ALL) for rows, n in [(1, 1), (4, 8), (7, 129), (5, 1023), (2, 2053), (3, 4099)]),
        replace(_case((513, 1031), "threads", **_ALL), interpreted=False),
        replace(_case((67, 32000), "vocabulary", ignored=0.1, **_ALL), interpreted=False),
        _case((6,), "one-token", **_ALL),
        _case((9, 128), "int32", integers=torch.int32),
        _case((0, 64), "empty", **_ALL),
        _case((2, 3, 5, 40), "4d", **_ALL),
        *(
            _case((2, 3, 5, 40), layout, Arg((2, 3, 5, 40), layout), cotangent="strided", **_ALL)
            for layout in ("swapped", "sliced", "offset", "expanded", "strided")
        ),
        _case((12, 50), "entropy", return_entropy=True, ignored=0.2),
        _case((12, 50), "lse", return_lse=True, ignored=0.2),
        _case((200, 3), "stats", return_stats=True, ignored=0.2),
        _case((12, 50), "ignored", ignored=0.4, **_ALL),
        _case((12, 50), "all-ignored", ignored=1.0, **_ALL),
        _case((12, 50), "ignore-index-0", ignore_index=0, **_ALL),
        _case((12, 50), "scale", logit_scale=0.7),
        _case((12, 50), "scale-all", logit_scale=2.5, **_ALL),
        _case((12, 2100), "negative-scale", logit_scale=-1.5, **_ALL),
        _case((12, 50), "softcap", softcap=2.0),
        _case((7, 2100), "softcap-scale-all", softcap=2.0, logit_scale=1.3, ignored=0.2, **_ALL),
        _values((8, 300), "softcap-saturated", normal(100.0), softcap=15.0, **_ALL),
        _values((8, 300), "confident", shifted(0.0, 30.0)),
        _values((8, 300), "confident-all", shifted(0.0, 30.0), **_ALL),
        _values((8, 300), "large", normal(60.0), **_ALL),
        _values((8, 300), "huge", normal(1e4), **_ALL),
        _values((8, 300), "far-up", shifted(1e4, 0.0), **_ALL),
        _values((8, 300), "far-down", shifted(-1e4, 0.0), **_ALL),
        _values((8, 300), "small", normal(1e-4), **_ALL),
        _values((8, 300), "equal", normal(0.0), **_ALL),
        _values((8, 300), "ruled-out", masked, **_ALL),
    ),
}

SAVED = {"log_probs": Saved(outputs=(1, 2), per_row={"logits": 2})}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient or the entropy sums (float64 inputs).

    The target's 1 - p passes through 0 for a confident token. The entropy has the digits of a sum of exponentials that
    is 1 or more, of which it takes the logarithm: it may be far below 1.
    """
    target = args["target"]
    if not (target != options.get("ignore_index", IGNORED)).any():
        return {}
    largest = sum(float(c.abs().max()) for c in cotangents if c.numel())
    found = {"logits": abs(options.get("logit_scale", 1.0)) * largest}
    logits = args["logits"]
    sizes = [1.0] * options.get("return_entropy", False) + [0.0] * options.get("return_lse", False)
    if options.get("return_stats"):
        mean = float(logits.nan_to_num(neginf=0.0).abs().max()) * abs(options.get("logit_scale", 1.0))
        sizes += [0.0, mean, 1.0]
    return found | {f"output {i}": size for i, size in enumerate(sizes, 1)}
