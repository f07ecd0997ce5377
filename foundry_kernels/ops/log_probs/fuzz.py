"""Random cases of log_probs."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.cross_entropy.cases import targets
from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.fuzzing import ELEMENTS, layouts, leading, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    n_classes = draw(sizes(4099, 1))
    rows = draw(leading(draw(ELEMENTS) // n_classes, 3))
    drawn = targets(n_classes, draw(st.sampled_from([0.0, 0.3, 1.0])))
    args: dict[str, Arg | None] = {
        "logits": draw(tensors((*rows, n_classes), spreads(1e-4, 3.0, 60.0, 1e3))),
        "target": Arg(rows, values=drawn, dtype=draw(st.sampled_from([torch.int64, torch.int32])), grad=False),
    }
    options = {
        "logit_scale": draw(st.sampled_from([1.0, 0.5, -2.0])),
        "softcap": draw(st.sampled_from([None, 15.0])),
        "return_entropy": draw(st.booleans()),
        "return_lse": draw(st.booleans()),
        "return_stats": draw(st.booleans()),
    }
    return Case("random", args, options, draw(layouts(len(rows))) if rows else "contiguous")
