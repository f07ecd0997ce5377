"""Random cases of linear_log_probs."""

from __future__ import annotations

from hypothesis import strategies as st

from foundry_kernels.ops._linear_loss.fuzz import CHUNK_SIZES, drawn_inputs, drawn_options
from foundry_kernels.testing import Case
from foundry_kernels.testing.fuzzing import layouts


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    rows, _, args = drawn_inputs(draw)
    options = drawn_options(draw, "return_entropy", "return_lse")
    options["chunk_size"] = draw(st.sampled_from([*CHUNK_SIZES, "tiles"]))
    return Case("random", args, options, draw(layouts(len(rows))) if rows else "contiguous")
