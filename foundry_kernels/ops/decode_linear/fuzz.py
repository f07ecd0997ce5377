"""Random cases of decode_linear."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from foundry_kernels.ops.decode_linear import MAX_ROWS
from foundry_kernels.ops.decode_linear.cases import WEIGHTS
from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.fuzzing import leading, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    width, count = draw(sizes(1031)), draw(st.integers(1, len(WEIGHTS)))
    shapes = [(*draw(leading(MAX_ROWS)), width), *((draw(sizes(257)), width) for _ in range(count))]
    drawn = [replace(draw(tensors(shape, spreads(1e-2, 30.0))), grad=False) for shape in shapes]
    args: dict[str, Arg | None] = dict.fromkeys(WEIGHTS)
    return Case("random", {"x": drawn[0]} | args | dict(zip(WEIGHTS, drawn[1:], strict=False)))
