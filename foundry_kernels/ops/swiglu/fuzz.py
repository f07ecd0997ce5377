"""Random cases of gated linear units."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.fuzzing import ELEMENTS, dropouts, layouts, leading, sizes, spreads, tensors


@st.composite
def _options(draw: st.DrawFn, packed: bool) -> dict[str, Any]:
    """Options of swiglu; every second time none."""
    if draw(st.booleans()):
        return {}
    options: dict[str, Any] = {
        "alpha": draw(st.sampled_from([1.0, 1.702, -0.5])),
        "limit": draw(st.sampled_from([None, 7.0, 0.5])),
        "up_offset": draw(st.sampled_from([0.0, 1.0])),
    }
    return options | {"interleaved": True} if packed and draw(st.booleans()) else options


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    width = draw(sizes(4099))
    rows = draw(leading(draw(ELEMENTS) // max(width, 1), 4))
    values = spreads(1e-4, 3.0, 40.0, 1e3)
    packed = draw(st.booleans())
    args: dict[str, Arg | None] = {"gate": draw(tensors((*rows, 2 * width if packed else width), values))}
    args["up"] = None if packed else draw(tensors((*rows, width), values))
    options: dict[str, Any] = {"geglu": {"approximate": draw(st.sampled_from(["none", "tanh"]))}}.get(op, {})
    if op == "swiglu":
        options = draw(_options(packed))
    options |= draw(dropouts())
    return Case("random", args, options, draw(layouts(len(rows) + 1)))
