"""Sample inputs, which the parity suite enumerates, and the size of what a gradient sums."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.contract import Options, Saved, Scales, Tensors
from foundry_kernels.testing import Arg, Case, Values, normal


def gated_case(
    shape: tuple[int, ...],
    note: str = "",
    *,
    x: Values | None = None,
    gate: Values | None = None,
    layout: str = "contiguous",
    weight: Arg | str | None = "",
    frozen: str = "",
    **options: Any,
) -> Case:
    args: dict[str, Arg | None] = {
        "x": Arg(shape, layout, x or normal(), grad="x" not in frozen),
        "gate": Arg(shape, layout, gate or normal(), grad="g" not in frozen),
        "weight": Arg((shape[-1],), values=normal(0.3, 1.0)) if isinstance(weight, str) else weight,
    }
    name = "x".join(map(str, shape)) + ("-" + note if note else "")
    return Case(name, args, {"eps": 1e-6} | options, layout if layout != "expanded" else "contiguous")


CASES: dict[str, tuple[Case, ...]] = {
    "gated_rms_norm": (
        gated_case((2, 3), "tiny"),  # for finite differences
        *(gated_case((rows, width)) for rows, width in [(1, 1), (5, 17), (33, 64), (70, 128), (7, 129), (3, 4096)]),
        gated_case((2, 8192), "widest"),
        gated_case((96,), "vector"),
        gated_case((2, 0, 64), "empty"),
        *(gated_case((2, 3, 5, 40), x, layout=x) for x in ("swapped", "sliced", "offset", "expanded", "strided")),
        *(
            gated_case(
                (9, 64),
                f"{activation}-{'rounds' if rounds else 'once'}",
                activation=activation,
                round_before_weight=rounds,
            )
            for activation in ("silu", "sigmoid")
            for rounds in (False, True)
        ),
        gated_case((9, 64), "no-weight", weight=None, round_before_weight=True),
        gated_case((9, 64), "weight-fp32", weight=Arg((64,), dtype=torch.float32), round_before_weight=True),
        *(gated_case((9, 64), f"frozen-{x}", frozen=x) for x in ("x", "g", "xg")),
        gated_case((9, 64), "frozen-weight", weight=Arg((64,), grad=False)),
        gated_case((9, 64), "large", x=normal(1e4), gate=normal(30.0)),
        gated_case((9, 64), "small", x=normal(1e-4), gate=normal(1e-3)),
        gated_case((9, 64), "zero", x=normal(0.0)),
        gated_case((9, 64), "saturated", gate=normal(5.0, -60.0), eps=None),
    ),
}

SAVED = {"gated_rms_norm": Saved(per_row={"x": 1})}


def scales(args: Tensors, options: Options, cotangents: tuple[Tensor, ...]) -> Scales:
    """Size of the terms that a gradient sums (float64 inputs); what is left out has its own size."""
    x, gate, weight = (args[n] for n in ("x", "gate", "weight"))
    if x.numel() == 0:
        return {}
    act = gate.sigmoid() * (gate if options.get("activation", "silu") == "silu" else 1.0)
    rstd = (x.square().mean(-1, keepdim=True) + (options.get("eps") or 0.0)).rsqrt()
    into = cotangents[0] * act
    terms = (into * x * rstd).reshape(-1, x.shape[-1]).square().sum(0).sqrt()
    along = into * rstd if weight is None else into * weight * rstd
    return {"x": float(along.abs().max()), "weight": float(terms.max())}


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What `inspect` compiles without --all."""
    cases = gated_case((64, 128)), gated_case((8, 4096)), gated_case((8, 8192))
    return tuple((case, dtype) for case in cases for dtype in (torch.bfloat16, torch.float32))
