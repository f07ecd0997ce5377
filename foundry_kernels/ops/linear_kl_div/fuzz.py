"""Random cases of linear_kl_div."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from foundry_kernels.ops._linear_loss.fuzz import CHUNK_SIZES, drawn_options
from foundry_kernels.ops.kl_div.fuzz import drawn_targets, shared_options
from foundry_kernels.ops.linear_kl_div.cases import listed
from foundry_kernels.testing import Arg, Case, Values, normal
from foundry_kernels.testing.fuzzing import layouts, leading, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    n_classes, width, teacher_width = draw(sizes(513, 1)), draw(sizes(65, 1)), draw(sizes(65, 1))
    rows = draw(leading(150, 3))

    def constant(shape: tuple[int, ...], values: st.SearchStrategy[Values]) -> Arg:
        return replace(draw(tensors(shape, values)), grad=False)

    args: dict[str, Arg | None] = {
        "hidden": draw(tensors((*rows, width), spreads(1e-2, 10.0))),
        "weight": draw(tensors((n_classes, width), st.just(normal(width**-0.5)))),
        "bias": draw(tensors((n_classes,))) if draw(st.booleans()) else None,
        "target": draw(drawn_targets(rows, n_classes)),
    }
    options = shared_options(draw) | drawn_options(draw, "return_entropy", "add_tail")
    form = draw(st.sampled_from(["hidden", "logits", "listed"]))
    if form == "listed":
        k = draw(st.integers(1, n_classes))
        args |= listed(rows, n_classes, k, draw(st.sampled_from([0.0, 0.3, 1.0])), draw(layouts(len(rows) + 1)))
    elif form == "logits":
        args["teacher_logits"] = constant((*rows, n_classes), spreads(1e-2, 10.0))
    else:
        args["teacher_hidden"] = constant((*rows, teacher_width), spreads(1e-2, 10.0))
        args["teacher_weight"] = constant((n_classes, teacher_width), st.just(normal(teacher_width**-0.5)))
        args["teacher_bias"] = constant((n_classes,), spreads(1.0)) if draw(st.booleans()) else None
        options |= {f"teacher_{name}": value for name, value in drawn_options(draw).items()}
    options["chunk_size"] = draw(st.sampled_from(CHUNK_SIZES))
    reduced = options["reduction"] != "none"
    return Case("random", args, options, "contiguous" if reduced or not rows else draw(layouts(len(rows))))
