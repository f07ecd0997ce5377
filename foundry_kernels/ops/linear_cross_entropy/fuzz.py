"""Random cases of linear_cross_entropy."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.cross_entropy.cases import class_weights, targets
from foundry_kernels.testing import Arg, Case, normal
from foundry_kernels.testing.fuzzing import layouts, leading, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    n_classes, width = draw(sizes(513, 1)), draw(sizes(65, 1))
    rows = draw(leading(150, 3))
    drawn = targets(n_classes, draw(st.sampled_from([0.0, 0.3, 1.0])))
    args: dict[str, Arg | None] = {
        "hidden": draw(tensors((*rows, width), spreads(1e-2, 10.0))),
        "weight": draw(tensors((n_classes, width), st.just(normal(width**-0.5)))),
        "target": Arg(rows, values=drawn, dtype=draw(st.sampled_from([torch.int64, torch.int32])), grad=False),
        "bias": draw(tensors((n_classes,))) if draw(st.booleans()) else None,
        "class_weight": Arg((n_classes,), values=class_weights, grad=False) if draw(st.booleans()) else None,
    }
    options = {
        "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "z_loss": draw(st.sampled_from([0.0, 1e-3])),
        "softcap": draw(st.sampled_from([None, 15.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.5, -2.0])),
        "chunk_size": draw(st.sampled_from([None, 1, 7, 1000])),
        "return_lse": draw(st.booleans()),
        "return_z_loss": draw(st.booleans()),
    }
    reduced = options["reduction"] != "none"
    return Case("random", args, options, "contiguous" if reduced or not rows else draw(layouts(len(rows))))
