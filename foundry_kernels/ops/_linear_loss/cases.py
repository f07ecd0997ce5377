"""What the sample inputs of the losses share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.cross_entropy.cases import IGNORED, class_weights, targets
from foundry_kernels.testing import Arg, Case, normal


def linear_case(
    rows: tuple[int, ...],
    width: int,
    n_classes: int,
    note: str = "",
    hidden: str = "contiguous",
    frozen: tuple[str, ...] = (),
    bias: bool = False,
    class_weight: bool = False,
    ignored: float = 0.0,
    std: float = 1.0,
    cotangent: str = "contiguous",
    **options: Any,
) -> Case:
    name = "x".join(map(str, (*rows, width))) + f"-{n_classes}" + ("-" + note if note else "")
    args: dict[str, Arg | None] = {
        "hidden": Arg((*rows, width), hidden, values=normal(std), grad="hidden" not in frozen),
        "weight": Arg((n_classes, width), values=normal(width**-0.5), grad="weight" not in frozen),
        "target": Arg(rows, values=targets(n_classes, ignored), dtype=torch.int64, grad=False),
        "bias": Arg((n_classes,), values=normal(0.5)) if bias else None,
    }
    if class_weight:
        args["class_weight"] = Arg((n_classes,), values=class_weights, grad=False)
    return Case(name, args, options, cotangent)


def magnitudes(args: Mapping[str, Tensor | None], options: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """The largest sum of the sizes of the products that a logit sums, and the largest of hidden and of weight (float64
    inputs). None if no token counts. Each result is a difference of logits: it is as exact as they are."""
    hidden, weight, target = args["hidden"], args["weight"], args["target"]
    assert hidden is not None
    assert weight is not None
    assert target is not None
    if not (target != options.get("ignore_index", IGNORED)).any():
        return None
    x, w = hidden.detach().reshape(-1, hidden.shape[-1]).abs(), weight.detach().abs()
    return float((x @ w.t()).max()), float(x.max()), float(w.max())
