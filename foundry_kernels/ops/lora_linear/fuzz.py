"""Random cases of lora_linear."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.testing import Arg, Case, normal
from foundry_kernels.testing.fuzzing import ELEMENTS, dropouts, layouts, leading, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    k, m, r = draw(sizes(300)), draw(sizes(300)), draw(sizes(65, 1))
    rows = draw(leading(draw(ELEMENTS) // max(k, m, 1)))
    dtypes = (None, torch.float32)
    thin = st.just(normal(max(k, 1) ** -0.5))
    args: dict[str, Arg | None] = {
        "x": draw(tensors((*rows, k), spreads(1e-3, 30.0))),
        "lora_a": draw(tensors((r, k), thin, dtypes)),
        "lora_b": draw(tensors((m, r), spreads(1e-2, 3.0), dtypes)),
    }
    based = draw(st.booleans())
    args["weight"] = None if based else draw(tensors((m, k), thin))
    args["bias"] = None if based else draw(st.none() | tensors((m,)))
    args["base"] = draw(tensors((*rows, m))) if based else None
    options: dict[str, Any] = draw(dropouts()) | {"scale": draw(st.sampled_from([1.0, 0.0, -0.25, 2.0, 16.0]))}
    return Case("random", args, options, draw(layouts(len(rows) + 1)))
