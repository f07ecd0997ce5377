"""What the random cases of the losses share."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.cross_entropy.cases import targets
from foundry_kernels.testing import Arg, normal
from foundry_kernels.testing.fuzzing import leading, sizes, spreads, tensors

CHUNK_SIZES = (None, 1, 7, 1000)


def drawn_inputs(draw: st.DrawFn) -> tuple[tuple[int, ...], int, dict[str, Arg | None]]:
    """The shape of the tokens, the number of classes, and the inputs that all losses have."""
    n_classes, width = draw(sizes(513, 1)), draw(sizes(65, 1))
    rows = draw(leading(150, 3))
    drawn = targets(n_classes, draw(st.sampled_from([0.0, 0.3, 1.0])))
    args: dict[str, Arg | None] = {
        "hidden": draw(tensors((*rows, width), spreads(1e-2, 10.0))),
        "weight": draw(tensors((n_classes, width), st.just(normal(width**-0.5)))),
        "target": Arg(rows, values=drawn, dtype=draw(st.sampled_from([torch.int64, torch.int32])), grad=False),
        "bias": draw(tensors((n_classes,))) if draw(st.booleans()) else None,
    }
    if draw(st.booleans()):
        rank, wide = draw(sizes(9, 1)), draw(st.booleans())
        args["low"] = Arg((*rows, rank), wide=wide)
        args["up"] = Arg((n_classes, rank), values=normal(0.3), wide=wide)
    return rows, n_classes, args


def drawn_options(draw: st.DrawFn, *flags: str) -> dict[str, Any]:
    """Options of the logits, and flags."""
    return {
        "softcap": draw(st.sampled_from([None, 15.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.5, -2.0])),
    } | {flag: draw(st.booleans()) for flag in flags}
