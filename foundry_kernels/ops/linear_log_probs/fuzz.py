"""Random cases of linear_log_probs."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.cross_entropy.cases import targets
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
    }
    options = {
        "softcap": draw(st.sampled_from([None, 15.0])),
        "logit_scale": draw(st.sampled_from([1.0, 0.5, -2.0])),
        "chunk_size": draw(st.sampled_from([None, "tiles", 1, 7, 1000])),
        "return_entropy": draw(st.booleans()),
        "return_lse": draw(st.booleans()),
    }
    return Case("random", args, options, draw(layouts(len(rows))) if rows else "contiguous")
