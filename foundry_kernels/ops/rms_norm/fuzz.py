"""Random cases of rms_norm and layer_norm, with and without a residual."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from foundry_kernels.testing import Arg, Case, normal
from foundry_kernels.testing.fuzzing import ELEMENTS, LOW_OR_FP32, dropouts, layouts, leading, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    width = draw(sizes(4099, least=1))
    shape = (*draw(leading(draw(ELEMENTS) // width, 4)), width)
    values = spreads(1e-4, 1e-2, 30.0, 1e4)
    args: dict[str, Arg | None] = {"x": draw(tensors(shape, values))}
    if op.startswith("add_"):
        args["residual"] = draw(tensors(shape, values, LOW_OR_FP32))
    options: dict[str, Any] = {"eps": draw(st.sampled_from([1e-6, 1e-5, 0.1]))}
    if op.startswith("add_"):
        options |= draw(dropouts())
    args["weight"] = draw(st.none() | tensors((width,), st.just(normal(0.3, 1.0)), LOW_OR_FP32))
    if op.endswith("layer_norm"):
        args["bias"] = draw(st.none() | tensors((width,), st.just(normal(0.5)), LOW_OR_FP32))
        return Case("random", args, options, draw(layouts(len(shape))))
    if args["weight"] is not None and draw(st.booleans()):
        options["weight_offset"] = draw(st.sampled_from([1.0, -0.5]))
    options["round_before_weight"] = draw(st.booleans())
    return Case("random", args, options, draw(layouts(len(shape))))
