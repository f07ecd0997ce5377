"""Random cases of cross_entropy."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.cross_entropy.cases import class_weights, targets
from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.fuzzing import ELEMENTS, LOW_OR_FP32, layouts, leading, sizes, spreads, tensors

_INTEGERS = (torch.int64, torch.int32)


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    n_classes = draw(sizes(4099, 1))
    rows = draw(leading(draw(ELEMENTS) // n_classes, 3))
    drawn = targets(n_classes, draw(st.sampled_from([0.0, 0.3, 1.0])))
    args: dict[str, Arg | None] = {
        "logits": draw(tensors((*rows, n_classes), spreads(1e-4, 3.0, 60.0, 1e3))),
        "target": Arg(rows, values=drawn, dtype=draw(st.sampled_from(_INTEGERS)), grad=False),
        "weight": None,
    }
    if draw(st.booleans()):
        args["weight"] = Arg((n_classes,), values=class_weights, dtype=draw(st.sampled_from(LOW_OR_FP32)), grad=False)
    options = {
        "reduction": draw(st.sampled_from(["none", "mean", "sum"])),
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-3])),
        "softcap": draw(st.sampled_from([None, 15.0])),
        "return_lse": draw(st.booleans()),
        "return_z_loss": draw(st.booleans()),
        "token_scaling": draw(st.booleans()),
        "return_token_accuracy": draw(st.booleans()),
        "return_predicted_tokens": draw(st.booleans()),
    }
    reduced = options["reduction"] != "none"
    return Case("random", args, options, "contiguous" if reduced or not rows else draw(layouts(len(rows))))
