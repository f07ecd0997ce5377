"""Random cases of swiglu and geglu."""

from __future__ import annotations

from hypothesis import strategies as st

from foundry_kernels.fuzzing import ELEMENTS, layouts, leading, sizes, spreads, tensors
from foundry_kernels.testing import Arg, Case


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    width = draw(sizes(4099))
    rows = draw(leading(draw(ELEMENTS) // max(width, 1), 4))
    values = spreads(1e-4, 3.0, 40.0, 1e3)
    packed = draw(st.booleans())
    args: dict[str, Arg | None] = {"gate": draw(tensors((*rows, 2 * width if packed else width), values))}
    args["up"] = None if packed else draw(tensors((*rows, width), values))
    options = {"approximate": draw(st.sampled_from(["none", "tanh"]))} if op == "geglu" else {}
    return Case("random", args, options, draw(layouts(len(rows) + 1)))
