"""Random cases of bias_gelu, bias_silu and bias_relu."""

from __future__ import annotations

from hypothesis import strategies as st

from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.fuzzing import ELEMENTS, LOW_OR_FP32, dropouts, layouts, leading, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    width = draw(sizes(4099))
    shape = (*draw(leading(draw(ELEMENTS) // max(width, 1), 4)), width)
    values = spreads(1e-4, 3.0, 40.0, 1e3)
    args: dict[str, Arg | None] = {"x": draw(tensors(shape, values))}
    args["bias"] = draw(st.none() | tensors((width,), values, LOW_OR_FP32))
    options = draw(dropouts())
    if op == "bias_gelu":
        options["approximate"] = draw(st.sampled_from(["none", "tanh"]))
    return Case("random", args, options, draw(layouts(len(shape))))
