"""Sample inputs, which the parity suite enumerates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.ops.cross_entropy.cases import IGNORED, masked, shifted, targets
from foundry_kernels.testing import Arg, Case, Values, normal
from foundry_kernels.testing.policy import ARITHMETIC

#: The divergences; of the Jensen-Shannon one with a mixture that is not symmetric too.
DIRECTIONS: dict[str, dict[str, Any]] = {
    "forward": {},
    "reverse": {"direction": "reverse"},
    "jsd": {"direction": "jsd"},
    "jsd-0.1": {"direction": "jsd", "beta": 0.1},
    "tvd": {"direction": "tvd"},
}


@dataclass(frozen=True)
class _Like:
    """The values of the argument before, drawn again from a generator in the state that it had, and `std` times normal
    values: logits of a teacher whom the student resembles."""

    values: Values
    std: float
    seed: int = 7

    def __call__(self, g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
        same = self.values(torch.Generator().manual_seed(self.seed), shape)
        return same + self.std * torch.randn(shape, generator=g, dtype=torch.float64)


def like(values: Values, std: float) -> Values:
    """Arguments with `like` of the same `values` differ by normal values of this deviation."""
    return _Like(values, std)


def _case(
    shape: tuple[int, ...],
    note: str = "",
    logits: Arg | None = None,
    teacher: Arg | None = None,
    ignored: float | None = None,
    integers: torch.dtype = torch.int64,
    cotangent: str = "contiguous",
    **options: Any,
) -> Case:
    name = "x".join(map(str, shape)) + ("-" + note if note else "")
    args = {
        "logits": logits or Arg(shape),
        "teacher_logits": replace(teacher or Arg(shape), grad=False),
        "target": None
        if ignored is None
        else Arg(shape[:-1], values=targets(shape[-1], ignored), dtype=integers, grad=False),
    }
    return Case(name, args, {"reduction": "mean"} | options, cotangent)  # `sharding` reads it


def _values(shape: tuple[int, ...], note: str, values: Values, teacher: Values | None = None, **options: Any) -> Case:
    both = Arg(shape, values=values), Arg(shape, values=teacher or values)
    return _case(shape, note, *both, reduction="none", **options)


_NONE: dict[str, Any] = {"reduction": "none"}
_SWAPPED = Arg((2, 3, 5, 40), "swapped")
_SHAPES = [(1, 1), (1, 17), (5, 17), (7, 64), (33, 127), (9, 128), (5, 1023), (3, 2053), (2, 4099)]

CASES: dict[str, tuple[Case, ...]] = {
    "kl_div": (
        *(_case(shape, name, **_NONE, **each) for shape in _SHAPES for name, each in DIRECTIONS.items()),
        *(_case((12, 50), f"{name}-mean", ignored=0.3, **each) for name, each in DIRECTIONS.items()),
        *(
            replace(_case((67, 32000), f"{name}-vocabulary", ignored=0.1, **each), interpreted=False)
            for name, each in DIRECTIONS.items()
        ),
        replace(_case((513, 1031), "threads", **DIRECTIONS["jsd"]), interpreted=False),
        _case((6,), "one-token", **_NONE),
        _case((12, 50), "sum", reduction="sum"),
        _case((9, 128), "int32", integers=torch.int32, ignored=0.2),
        _case((0, 64), "empty", **_NONE),
        _case((0, 64), "empty-mean"),
        _case((2, 3, 5, 40), "4d", **_NONE),
        *(
            _case((2, 3, 5, 40), layout, Arg((2, 3, 5, 40), layout), cotangent="strided", **_NONE)
            for layout in ("swapped", "sliced", "offset", "expanded", "strided")
        ),
        _case((2, 3, 5, 40), "strided-teacher", teacher=Arg((2, 3, 5, 40), "strided"), **_NONE),
        _case((2, 3, 5, 40), "both-swapped", _SWAPPED, _SWAPPED, **DIRECTIONS["jsd"]),
        *(_case((12, 50), f"{name}-ignored", ignored=0.4, **_NONE, **each) for name, each in DIRECTIONS.items()),
        *(_case((12, 50), f"all-ignored-{kind}", ignored=1.0, reduction=kind) for kind in ("none", "mean")),
        _case((12, 50), "ignore-index-0", ignored=0.0, ignore_index=0),
        *(
            _case((12, 50), f"{name}-temperature-{t}", temperature=t, **_NONE, **each)
            for name, each in DIRECTIONS.items()
            for t in (0.5, 3.0)
        ),
        *(
            case
            for name, each in DIRECTIONS.items()
            for case in (
                _values((8, 300), f"{name}-confident", shifted(0.0, 30.0), **each),
                _values((8, 300), f"{name}-large", normal(60.0), **each),
                _values((8, 300), f"{name}-far-up", shifted(1e4, 0.0), **each),
                _values((8, 300), f"{name}-small", normal(1e-4), **each),
                _values((8, 300), f"{name}-alike", like(normal(3.0), 0.0), like(normal(3.0), 0.01), **each),
                _values((8, 300), f"{name}-equal", like(normal(3.0), 0.0), **each),
            )
        ),
        *(
            _values((8, 300), f"{name}-ruled-out", normal(1.0), masked, **DIRECTIONS[name])
            for name in ("forward", "jsd", "jsd-0.1", "tvd")
        ),
        *(_values((8, 300), f"{name}-huge", normal(1e4), **DIRECTIONS[name]) for name in ("jsd", "jsd-0.1", "tvd")),
    ),
}

SAVED = {"kl_div": Saved(per_row={"logits": 1})}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient or the loss sums (float64 inputs).

    A term of the loss is a probability times a difference of log-probabilities, as large as the latter may be. A
    gradient is a difference of probabilities, or a probability times such a difference.
    """
    logits, teacher, target = args["logits"], args["teacher_logits"], args.get("target")
    counts = torch.ones(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    if target is not None:
        counts = target != options.get("ignore_index", IGNORED)
    if not counts.any():
        return {}
    return terms(logits[counts], teacher[counts], options, cotangents[0])


def terms(logits: Tensor, teacher: Tensor, options: Options, cotangent: Tensor) -> dict[str, float]:
    """The scales of the loss and of the logits' gradient, from the logits of the tokens that count."""
    temperature, direction = options.get("temperature", 1.0), options.get("direction", "forward")
    log_q, log_p = (torch.log_softmax(x / temperature, -1) for x in (logits, teacher))
    weight = {"forward": log_p.exp(), "reverse": log_q.exp()}.get(direction, log_p.exp() + log_q.exp())
    distances = (log_p - log_q).abs().masked_fill(weight == 0.0, 0.0)
    size = 1.0 if direction in ("jsd", "tvd") else float((weight * distances).sum(-1).max())
    dlogits = float(cotangent.abs().max()) / temperature * (1.0 if direction == "forward" else max(size, 1.0))
    if direction == "tvd":  # where float32 does not tell which is larger, the sign is wrong by its own size
        unknown = (distances <= 1e-6 * (1.0 - torch.minimum(log_q, log_p))) & (distances > 0.0)
        dlogits *= max(1.0, float((log_q.exp() * unknown).sum(-1).max()) / ARITHMETIC[torch.float32])
    many = logits.shape[0]
    reduction = options.get("reduction", "mean")
    if reduction == "mean":
        dlogits /= many
    return {"output 0": max(size, 1.0) * (many if reduction == "sum" else 1), "logits": dlogits}


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all: each divergence."""
    kinds = tuple(_case((64, 32000), name, **each) for name, each in DIRECTIONS.items() if name != "jsd-0.1")
    return tuple((case, dtype) for case in kinds for dtype in (torch.bfloat16, torch.float32))
