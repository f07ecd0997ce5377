"""Random cases of kl_div."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.cross_entropy.cases import targets
from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.fuzzing import ELEMENTS, layouts, leading, sizes, spreads, tensors

#: Options that linear_kl_div has too.
SHARED = {
    "direction": st.sampled_from(["forward", "reverse", "jsd", "tvd"]),
    "beta": st.sampled_from([0.5, 0.1, 0.9, 0.0, 1.0]),
    "temperature": st.sampled_from([1.0, 0.5, 4.0]),
    "reduction": st.sampled_from(["none", "mean", "sum"]),
}


@st.composite
def drawn_targets(draw: st.DrawFn, rows: tuple[int, ...], n_classes: int) -> Arg | None:
    ignored = draw(st.sampled_from([None, 0.0, 0.3, 1.0]))
    if ignored is None:
        return None
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return Arg(rows, values=targets(n_classes, ignored), dtype=dtype, grad=False)


def shared_options(draw: st.DrawFn) -> dict[str, Any]:
    return {name: draw(values) for name, values in SHARED.items()}


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    n_classes = draw(sizes(4099, 1))
    rows = draw(leading(draw(ELEMENTS) // n_classes, 3))
    shape = (*rows, n_classes)
    args: dict[str, Arg | None] = {
        "logits": draw(tensors(shape, spreads(1e-4, 3.0, 60.0))),
        "teacher_logits": replace(draw(tensors(shape, spreads(1e-4, 3.0, 60.0))), grad=False),
        "target": draw(drawn_targets(rows, n_classes)),
    }
    options = shared_options(draw)
    reduced = options["reduction"] != "none"
    return Case("random", args, options, "contiguous" if reduced or not rows else draw(layouts(len(rows))))
