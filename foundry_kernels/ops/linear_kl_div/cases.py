"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Saved
from foundry_kernels.ops._linear_loss.cases import common_cases, gradients_of_pair, of_few
from foundry_kernels.ops._linear_loss.cases import linear_case as linear_loss_case
from foundry_kernels.ops.cross_entropy.cases import IGNORED
from foundry_kernels.ops.kl_div.cases import DIRECTIONS, terms
from foundry_kernels.testing import Arg, Case, normal


def linear_case(
    rows: tuple[int, ...],
    width: int,
    n_classes: int,
    note: str = "",
    hidden: str = "contiguous",
    frozen: tuple[str, ...] = (),
    bias: bool = False,
    teacher_width: int | None = None,
    logits: str | None = None,
    ignored: float | None = None,
    std: float = 1.0,
    cotangent: str = "contiguous",
    rank: int = 0,
    wide: bool = False,
    **options: Any,
) -> Case:
    """logits: the layout of the teacher's logits, if these are given in place of its hidden states. ignored: None for
    no target."""
    made = linear_loss_case(
        rows, width, n_classes, note, hidden, frozen, bias, False, ignored or 0.0, std, cotangent, rank, wide
    )
    width = teacher_width or width

    def of_teacher(shape: tuple[int, ...], layout: str = "contiguous", std: float = 1.0) -> Arg:
        return Arg(shape, layout, normal(std), grad=False)

    args = dict(made.args)
    if ignored is None:
        del args["target"]
    if logits is None:
        args["teacher_hidden"] = of_teacher((*rows, width), hidden, std)
        args["teacher_weight"] = of_teacher((n_classes, width), std=width**-0.5)
        args["teacher_bias"] = of_teacher((n_classes,), std=0.5) if bias else None
    else:
        args["teacher_logits"] = of_teacher((*rows, n_classes), logits)
    return replace(made, args=args, options=options)


_NONE: dict[str, Any] = {"reduction": "none"}
_ALL: dict[str, Any] = {"bias": True, "ignored": 0.2, "temperature": 2.0, "teacher_width": 24}

CASES: dict[str, tuple[Case, ...]] = {
    "linear_kl_div": (
        *common_cases(linear_case, {}, _NONE, sizes=()),
        *(
            linear_case((rows,), width, n, name, **each)
            for rows, width, n in [(1, 1, 1), (5, 8, 9), (7, 16, 33)]
            for name, each in DIRECTIONS.items()
        ),
        linear_case((200,), 32, 1031, **DIRECTIONS["jsd"]),
        *(
            linear_case((12,), 8, 50, f"{name}-{kind}", reduction=kind, chunk_size=5, **_ALL, **each)
            for name, each in DIRECTIONS.items()
            for kind in ("none", "mean", "sum")
        ),
        linear_case((12,), 8, 50, "one-by-one", chunk_size=1, reduction="sum"),
        *(linear_case((2, 3, 5), 8, 40, f"logits-{layout}", logits=layout) for layout in ("contiguous", "swapped")),
        linear_case((40,), 8, 50, "logits-ignored", logits="contiguous", ignored=0.3, chunk_size=7),
        linear_case((40,), 8, 50, "logits-ignored-none", logits="strided", ignored=0.3, chunk_size=7, **_NONE),
        linear_case((2, 0), 8, 40, "empty-none", **_NONE),
        linear_case((2, 3, 5), 8, 40, "wide-teacher", teacher_width=12),
        *(linear_case((12,), 8, 50, f"frozen-{name}-none", frozen=(name,), **_NONE) for name in ("hidden", "weight")),
        linear_case((12,), 8, 50, "all-ignored-none", ignored=1.0, **_NONE),
        *(linear_case((12,), 8, 50, f"{name}-large", std=60.0, **each) for name, each in DIRECTIONS.items()),
    ),
}

SAVED = {
    "linear_kl_div": Saved(
        per_row={"hidden": 1}, gradients=("hidden", "weight", "bias"), made=of_few,
        more=lambda args, options: 2 * of_few(args, options),  # the teacher's logits too
    )
}  # fmt: skip


def scales(
    args: Mapping[str, Tensor | None], options: Mapping[str, Any], cotangents: tuple[Tensor, ...]
) -> dict[str, float]:
    """Size of the terms that a gradient or the loss sums (float64 inputs), by argument.

    A logit sums products, and the loss is made of differences of logits: it is as exact as they are.
    """
    hidden, weight, target = args["hidden"], args["weight"], args.get("target")
    assert hidden is not None
    assert weight is not None
    counts = None if target is None else target != options.get("ignore_index", IGNORED)
    if hidden.numel() == 0 or (counts is not None and not counts.any()):
        return {}

    def counting(rows: Tensor) -> Tensor:  # the meta device has no number of rows for a mask
        return rows.detach().reshape(-1, rows.shape[-1]) if counts is None else rows.detach()[counts]

    x, w = counting(hidden), weight.detach()
    logits, size = _logits(x, w, args.get("bias"))
    low, up = args.get("low"), args.get("up")
    if low is not None and up is not None:
        of_pair, more = _logits(counting(low), up, None)
        logits, size = logits + of_pair, size + more
    teacher = args.get("teacher_logits")
    if teacher is None:
        of_teacher, head = args["teacher_hidden"], args["teacher_weight"]
        assert of_teacher is not None
        assert head is not None
        of_teacher_logits, of_teacher_size = _logits(counting(of_teacher), head, args.get("teacher_bias"))
        size = max(size, of_teacher_size)
    else:
        of_teacher_logits = counting(teacher)
    found = terms(logits, of_teacher_logits, options, cotangents[0])
    many = x.shape[0] if options.get("reduction", "mean") == "sum" else 1
    size /= options.get("temperature", 1.0)
    # An error of the logits is one of the distances that the gradient's terms contain.
    dlogits = found["logits"] * (1.0 if options.get("direction", "forward") == "forward" else max(size, 1.0))
    return {
        "output 0": max(found["output 0"], many * size),
        "hidden": 2 * dlogits * float(w.abs().max()),
        "weight": dlogits * float(x.abs().max()),
        "bias": dlogits,
        **gradients_of_pair(args, dlogits),
    }


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, float]:
    """The logits, and the size of the products that they sum."""
    y = x @ weight.detach().t()
    return y if bias is None else y + bias.detach(), float((x.abs() @ weight.detach().abs().t()).max())


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: each divergence, with its gradient and without."""
    kinds = (
        *(linear_case((64,), 16, 32000, name, **each) for name, each in DIRECTIONS.items() if name != "jsd-0.1"),
        *(linear_case((64,), 16, 50257, name, **each) for name, each in DIRECTIONS.items() if name != "jsd-0.1"),
        linear_case((64,), 16, 32000, "none", **_NONE),
    )
    return tuple((case, dtype) for case in kinds for dtype in (torch.bfloat16, torch.float32))
