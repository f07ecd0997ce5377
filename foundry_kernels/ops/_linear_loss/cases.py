"""What the sample inputs of the losses share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from foundry_kernels.core.contract import Options, Tensors
from foundry_kernels.ops._linear_loss.sizes import SMALL, SUMMED24
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
    rank: int = 0,
    wide: bool = False,
    **options: Any,
) -> Case:
    name = "x".join(map(str, (*rows, width))) + f"-{n_classes}" + ("-" + note if note else "")
    args: dict[str, Arg | None] = {
        "hidden": Arg((*rows, width), hidden, values=normal(std), grad="hidden" not in frozen),
        "weight": Arg((n_classes, width), values=normal(width**-0.5), grad="weight" not in frozen),
        "target": Arg(rows, values=targets(n_classes, ignored), dtype=torch.int64, grad=False),
        "bias": Arg((n_classes,), values=normal(0.5)) if bias else None,
    }
    if rank:
        args["low"] = Arg((*rows, rank), hidden, values=normal(std), grad="low" not in frozen, wide=wide)
        args["up"] = Arg((n_classes, rank), values=normal(0.5), grad="up" not in frozen, wide=wide)
    if class_weight:
        args["class_weight"] = Arg((n_classes,), values=class_weights, grad=False)
    return Case(name, args, options, cotangent)


#: Numbers of rows, widths and numbers of classes.
SIZES = ((1, 1, 1), (4, 8, 9), (7, 16, 33), (130, 8, 67), (9, 24, 129))


def common_cases(
    case: Callable[..., Case],
    results: Options,
    each: Options,
    sizes: tuple[tuple[int, int, int], ...] = SIZES,
) -> tuple[Case, ...]:
    """Cases of every loss, made by its `case`. Options: those that request all `results`, and those for which `each`
    token's loss has a gradient of its own. sizes: as SIZES; a loss with sizes of its own leaves them out."""
    layouts = ("swapped", "sliced", "offset", "expanded", "strided")
    return (
        *(case((rows,), width, n) for rows, width, n in sizes),
        case((12,), 8, 50, "chunks", chunk_size=5),
        case((2, 3, 5), 8, 40, "4d", **results),
        *(case((2, 3, 5), 8, 40, layout, hidden=layout, cotangent="strided", **each) for layout in layouts),
        case((0,), 8, 40, "empty", **results),
        case((12,), 8, 50, "bias", bias=True, **results),
        *(case((12,), 8, 50, "frozen-" + name, frozen=(name,), **results) for name in ("hidden", "weight")),
        case((12,), 8, 50, "frozen-both", frozen=("hidden", "weight"), bias=True),
        case((40,), 8, 50, "ignored", ignored=0.4, chunk_size=7, **results),
        case((12,), 8, 50, "all-ignored", ignored=1.0, **results),
        case((12,), 8, 5, "ignore-index-0", ignored=0.0, ignore_index=0, **results),
        case((40,), 8, 50, "one-chunk", ignored=0.2, chunk_size=40, **results),
        *pair_cases(case, "pair", ignored=0.2, chunk_size=7, **results),
    )


def pair_cases(case: Callable[..., Case], note: str, **options: Any) -> tuple[Case, ...]:
    """Cases of a head with an adapter."""
    return (
        case((2, 20), 8, 50, note, bias=True, rank=3, frozen=("weight",), **options),
        *(
            case((40,), 8, 50, f"{note}-frozen-{name}", rank=2, frozen=("weight", name), **options)
            for name in ("low", "up")
        ),
        case((40,), 8, 50, f"{note}-float32", rank=4, wide=True, frozen=("weight",), **options),
    )


def of_few(args: Tensors, options: Options) -> int:
    """Numbers that a direct call of few tokens on a CPU keeps: the logits and, if it is small, copies in float32."""
    hidden, weight = args["hidden"], args["weight"]
    tokens, multiplications = hidden[..., 0].numel(), hidden.numel() * weight.shape[0]
    if tokens > SUMMED24 or (tokens > hidden.shape[-1] and multiplications > SMALL):
        return 0
    copies = hidden.numel() + weight.numel() + weight.shape[0] if hidden.dtype.itemsize == 2 else 0
    return tokens * weight.shape[0] + (copies if multiplications <= SMALL else 0)


def tiles_cases(results: Options) -> tuple[Case, ...]:
    """Cases in blocks of classes; `results` as above."""
    tiles: dict[str, Any] = {"chunk_size": "tiles", **results}
    return (
        linear_case((12,), 8, 50, "tiles", **tiles),
        # Several blocks of tokens, of classes and of the width.
        linear_case((70,), 40, 131, "tiles", ignored=0.2, **tiles),
        *(linear_case((12,), 8, 50, f"tiles-frozen-{name}", frozen=(name,), **tiles) for name in ("hidden", "weight")),
        linear_case((3,), 4, 1, "tiles", **tiles),
        linear_case((12,), 8, 5, "tiles-ignore-index-0", ignore_index=0, **tiles),
        linear_case((12,), 8, 50, "tiles-all-ignored", ignored=1.0, **tiles),
        linear_case((0,), 8, 40, "tiles-empty", **tiles),
        linear_case((12,), 8, 50, "tiles-large", std=60.0, **tiles),
        *pair_cases(linear_case, "tiles-pair", ignored=0.2, **tiles),
    )


def magnitudes(args: Tensors, options: Options) -> tuple[float, float, float] | None:
    """The largest sum of the sizes of the products that a logit sums, and the largest of hidden and of weight (float64
    inputs). None if no token counts. Each result is a difference of logits: it is as exact as they are."""
    hidden, weight, target = args["hidden"], args["weight"], args["target"]
    if not (target != options.get("ignore_index", IGNORED)).any():
        return None
    x, w = hidden.reshape(-1, hidden.shape[-1]).abs(), weight.abs()
    logits, low, up = x @ w.t(), args.get("low"), args.get("up")
    if low is not None and up is not None:
        logits = logits + low.reshape(-1, low.shape[-1]).abs() @ up.abs().t()
    return float(logits.max()), float(x.max()), float(w.max())


def gradients_of_pair(args: Tensors, dlogits: float) -> dict[str, float]:
    """The size of the terms that the gradients of low and up sum, from that of a logit's gradient."""
    low, up = args.get("low"), args.get("up")
    if low is None or up is None:
        return {}
    return {"low": 2 * dlogits * float(up.abs().max()), "up": dlogits * float(low.abs().max())}
