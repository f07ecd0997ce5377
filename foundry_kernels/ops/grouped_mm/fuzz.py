"""Random cases of grouped_mm."""

from __future__ import annotations

from hypothesis import strategies as st

from foundry_kernels.ops.grouped_mm.cases import ends
from foundry_kernels.testing import Arg, Case, normal
from foundry_kernels.testing.fuzzing import layouts, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    groups = draw(st.lists(st.just(0) | sizes(65), min_size=1, max_size=9))
    k, n = draw(sizes(129)), draw(sizes(129))
    rows = sum(groups) + draw(st.just(0) | sizes(33))
    args: dict[str, Arg | None] = {
        "x": draw(tensors((rows, k), spreads(1e-3, 30.0))),
        "weight": draw(tensors((len(groups), k, n), st.just(normal(max(k, 1) ** -0.5)))),
        "offs": ends(*groups),
    }
    return Case("random", args, {}, draw(layouts(2)))
