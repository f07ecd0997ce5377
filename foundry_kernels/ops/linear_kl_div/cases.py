"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.ops._linear_loss.cases import common_cases, gradients_of_pair, of_few
from foundry_kernels.ops._linear_loss.cases import linear_case as linear_loss_case
from foundry_kernels.ops.cross_entropy.cases import IGNORED
from foundry_kernels.ops.kl_div.cases import DIRECTIONS, terms
from foundry_kernels.ops.kl_div.reference import capped
from foundry_kernels.ops.linear_kl_div.teacher import Listed
from foundry_kernels.testing import Arg, Case, normal


@dataclass(frozen=True)
class _Classes:
    """Different classes of each token, among `n_classes`; `repeated` lists the first one again in the second place."""

    n_classes: int
    repeated: bool = False

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        ids = torch.rand((*shape[:-1], self.n_classes), generator=g).topk(shape[-1])[1].double()
        if self.repeated and shape[-1] > 1:
            ids[..., 1] = ids[..., 0]
        return ids


@dataclass(frozen=True)
class _Largest:
    """The largest log-probabilities of a distribution of this many classes, of which a share is missing."""

    n_classes: int
    missing: float = 0.0
    std: float = 2.0

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        logits = self.std * torch.randn((*shape[:-1], self.n_classes), generator=g, dtype=torch.float64)
        found = logits.log_softmax(-1).topk(shape[-1])[0]
        return found.masked_fill(torch.rand(shape, generator=g) < self.missing, -math.inf)


def listed(
    rows: tuple[int, ...], n_classes: int, k: int, missing: float = 0.0, layout: str = "contiguous"
) -> dict[str, Arg]:
    """What a teacher lists; with some `missing`, others are repeated."""
    return {
        "teacher_ids": Arg((*rows, k), values=_Classes(n_classes, missing > 0.0), dtype=torch.int64, grad=False),
        "teacher_log_probs": Arg((*rows, k), layout, _Largest(n_classes, missing), grad=False, wide=True),
    }


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
    k: int = 0,
    missing: float = 0.0,
    ignored: float | None = None,
    std: float = 1.0,
    cotangent: str = "contiguous",
    rank: int = 0,
    wide: bool = False,
    **options: Any,
) -> Case:
    """logits: the layout of the teacher's logits, if these are given in place of its hidden states. k: how many classes
    it lists instead. ignored: None for no target."""
    made = linear_loss_case(
        rows, width, n_classes, note, hidden, frozen, bias, False, ignored or 0.0, std, cotangent, rank, wide
    )
    width = teacher_width or width

    def of_teacher(shape: tuple[int, ...], layout: str = "contiguous", std: float = 1.0) -> Arg:
        return Arg(shape, layout, normal(std), grad=False)

    args = dict(made.args)
    if ignored is None:
        del args["target"]
    if k:
        args |= listed(rows, n_classes, k, missing, hidden)
    elif logits is None:
        args["teacher_hidden"] = of_teacher((*rows, width), hidden, std)
        args["teacher_weight"] = of_teacher((n_classes, width), std=width**-0.5)
        args["teacher_bias"] = of_teacher((n_classes,), std=0.5) if bias else None
    else:
        args["teacher_logits"] = of_teacher((*rows, n_classes), logits)
    return replace(made, args=args, options=options)


_NONE: dict[str, Any] = {"reduction": "none"}
_ALL: dict[str, Any] = {"bias": True, "ignored": 0.2, "temperature": 2.0, "teacher_width": 24}
_CAPS: tuple[tuple[str, dict[str, Any]], ...] = (("", {}), ("capped", {"softcap": 1.5}))
_ENTROPY: dict[str, Any] = {"return_entropy": True}
_SCALED: dict[str, Any] = {"logit_scale": 0.7, "softcap": 3.0, "ignored": 0.2, "temperature": 1.5, "chunk_size": 7}

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
        *(
            linear_case(
                (12,),
                8,
                50,
                f"scaled-{name}",
                bias=True,
                teacher_logit_scale=1.3,
                teacher_softcap=2.0,
                **_SCALED,
                **_ENTROPY,
                **each,
            )
            for name, each in DIRECTIONS.items()
        ),
        linear_case((12,), 8, 50, "scaled-none", teacher_logit_scale=1.3, **_SCALED, **_NONE),
        linear_case((12,), 8, 50, "teacher-capped", teacher_softcap=2.0, **_NONE),
        *(
            linear_case((12,), 8, 50, f"listed-{name}-{kind}", k=5, add_tail=add_tail, bias=True, **each)
            for name, each in DIRECTIONS.items()
            for kind, add_tail in (("tail", True), ("alone", False))
        ),
        *(
            linear_case(
                (2, 20),
                8,
                50,
                f"listed-scaled-{add_tail}-{name}",
                "swapped",
                k=6,
                missing=0.3,
                add_tail=add_tail,
                **_SCALED,
                **_ENTROPY,
                **kind,
            )
            for add_tail in (True, False)
            for name, kind in (("none", _NONE), ("mean", {}))
        ),
        *(
            linear_case((12,), 8, 9, f"listed-{k}-{name}", k=k, missing=0.5 * (k == 1), **each, **_NONE)
            for k in (1, 8, 9)
            for name, each in _CAPS
        ),
        linear_case((2, 20), 8, 50, "listed-pair", k=3, bias=True, rank=3, frozen=("weight",), ignored=0.3, **_NONE),
        linear_case((12,), 8, 50, "listed-large", k=5, std=60.0),
        linear_case((0,), 8, 50, "listed-empty", k=5),
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


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient or the loss sums (float64 inputs), by argument.

    A logit sums products, and the loss is made of differences of logits: it is as exact as they are.
    """
    hidden, weight, target = args["hidden"], args["weight"], args.get("target")
    counts = None if target is None else target != options.get("ignore_index", IGNORED)
    if hidden.numel() == 0 or (counts is not None and not counts.any()):
        return {}

    def counting(rows: Tensor) -> Tensor:  # the meta device has no number of rows for a mask
        return rows.reshape(-1, rows.shape[-1]) if counts is None else rows[counts]

    x, w = counting(hidden), weight
    logits, size = _logits(x, w, args.get("bias"))
    low, up = args.get("low"), args.get("up")
    if low is not None and up is not None:
        of_pair, more = _logits(counting(low), up, None)
        logits, size = logits + of_pair, size + more
    factor = abs(options.get("logit_scale", 1.0))
    logits, size = capped(logits * options.get("logit_scale", 1.0), options.get("softcap")), size * factor
    ids, of_teacher = args.get("teacher_ids"), args.get("teacher_hidden")
    if ids is not None:
        given, t = args["teacher_log_probs"], options.get("temperature", 1.0)
        of_ids = Listed.of(counting(ids), counting(given), x.new_ones(x.shape[0], dtype=torch.bool), w.shape[0])
        others = torch.ones_like(logits, dtype=torch.bool).scatter(1, of_ids.ids, False)
        rest = (logits / t).masked_fill(~others, -torch.inf).logsumexp(1, keepdim=True)
        q, p = of_ids.buckets((logits / t).gather(1, of_ids.ids), rest if options.get("add_tail", True) else None)
        found = terms(t * q, t * p, options, cotangents[0])
    elif of_teacher is not None:
        of_teacher_logits, of_teacher_size = _logits(
            counting(of_teacher), args["teacher_weight"], args.get("teacher_bias")
        )
        scale = options.get("teacher_logit_scale", 1.0)
        size = max(size, abs(scale) * of_teacher_size)
        of_teacher_logits = capped(scale * of_teacher_logits, options.get("teacher_softcap"))
        found = terms(logits, of_teacher_logits, options, cotangents[0])
    else:
        found = terms(logits, counting(args["teacher_logits"]), options, cotangents[0])
    many = x.shape[0] if options.get("reduction", "mean") == "sum" else 1
    size /= options.get("temperature", 1.0)
    # An error of the logits is one of the distances that the gradient's terms contain.
    dlogits = factor * found["logits"] * (1.0 if options.get("direction", "forward") == "forward" else max(size, 1.0))
    return {
        "output 0": max(found["output 0"], many * size),
        "output 1": size,
        "hidden": 2 * dlogits * float(w.abs().max()),
        "weight": dlogits * float(x.abs().max()),
        "bias": dlogits,
        **gradients_of_pair(args, dlogits),
    }


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, float]:
    """The logits, and the size of the products that they sum."""
    y = x @ weight.t()
    return y if bias is None else y + bias, float((x.abs() @ weight.abs().t()).max())


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: each divergence, with its gradient and without."""
    kinds = (
        *(linear_case((64,), 16, 32000, name, **each) for name, each in DIRECTIONS.items() if name != "jsd-0.1"),
        *(linear_case((64,), 16, 50257, name, **each) for name, each in DIRECTIONS.items() if name != "jsd-0.1"),
        linear_case((64,), 16, 32000, "none", **_NONE),
        linear_case((64,), 16, 32000, "capped", softcap=30.0, teacher_softcap=30.0),
        linear_case((64,), 16, 50257, "capped-jsd", softcap=30.0, teacher_softcap=30.0, **DIRECTIONS["jsd"]),
    )
    return tuple((case, dtype) for case in kinds for dtype in (torch.bfloat16, torch.float32))
