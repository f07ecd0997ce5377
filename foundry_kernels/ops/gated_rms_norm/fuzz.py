"""Random cases of the operation."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from foundry_kernels.testing import Arg, Case, normal
from foundry_kernels.testing.fuzzing import ELEMENTS, LOW_OR_FP32, layouts, leading, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    width = draw(sizes(2050, least=1))
    shape = (*draw(leading(draw(ELEMENTS) // width, 4)), width)
    args: dict[str, Arg | None] = {
        "x": draw(tensors(shape, spreads(1e-4, 1e-2, 30.0, 1e4))),
        "gate": draw(tensors(shape, spreads(1e-2, 30.0))),
        "weight": draw(st.none() | tensors((width,), st.just(normal(0.3, 1.0)), LOW_OR_FP32)),
    }
    options: dict[str, Any] = {
        "eps": draw(st.sampled_from([1e-6, 1e-5, 0.1])),
        "activation": draw(st.sampled_from(["silu", "sigmoid"])),
        "round_before_weight": draw(st.booleans()),
    }
    return Case("random", args, options, draw(layouts(len(shape))))
