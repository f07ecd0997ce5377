"""Random cases of linear_cross_entropy."""

from __future__ import annotations

from hypothesis import strategies as st

from foundry_kernels.ops._linear_loss.fuzz import CHUNK_SIZES, drawn_inputs, drawn_options
from foundry_kernels.ops.cross_entropy.cases import class_weights
from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.fuzzing import layouts


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    rows, n_classes, args = drawn_inputs(draw)
    args["class_weight"] = Arg((n_classes,), values=class_weights, grad=False) if draw(st.booleans()) else None
    options = drawn_options(draw, "return_lse", "return_z_loss") | {
        "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1])),
        "z_loss": draw(st.sampled_from([0.0, 1e-3])),
        "chunk_size": draw(st.sampled_from(CHUNK_SIZES)),
    }
    reduced = options["reduction"] != "none"
    return Case("random", args, options, "contiguous" if reduced or not rows else draw(layouts(len(rows))))
