"""Random cases of combine_experts."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.combine_experts.cases import slots
from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.fuzzing import ELEMENTS, layouts, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    width, k = draw(sizes(1031)), draw(st.integers(1, 9))
    tokens = draw(sizes(max(draw(ELEMENTS) // (k * max(width, 1)), 1)))
    rows = draw(st.just(tokens * k) | st.integers(0, 2 * tokens * k + 3))
    integers = draw(st.sampled_from([torch.int32, torch.int64]))
    args: dict[str, Arg | None] = {
        "x": draw(tensors((rows, width), spreads(1e-3, 30.0))),
        "weights": draw(st.none() | tensors((tokens, k), dtypes=(None, torch.float32))),
        "slots": slots(tokens, k, rows, draw(layouts(2).filter(lambda layout: layout != "expanded")), integers),
    }
    return Case("random", args, {}, draw(layouts(2)))
