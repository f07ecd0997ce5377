"""Random cases of short_conv1d."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.short_conv1d.cases import documents
from foundry_kernels.testing import Arg, Case
from foundry_kernels.testing.fuzzing import ELEMENTS, LOW_OR_FP32, layouts, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    channels, taps = draw(sizes(1031)), draw(st.sampled_from([1, 2, 3, 4, 4, 4, 5, 8]))
    most = max(draw(ELEMENTS) // max(channels, 1), 1)
    packed = draw(st.booleans())
    args: dict[str, Arg | None] = {}
    if packed:
        lengths: list[int] = draw(st.lists(sizes(most), max_size=6))
        batch, length, rows = 1, sum(lengths), len(lengths)
        integers = draw(st.sampled_from([torch.int32, torch.int64]))
        args["cu_seqlens"] = documents(lengths, draw(st.sampled_from(["contiguous", "strided"])), integers)
    else:
        length = draw(sizes(most))
        batch = rows = draw(sizes(min(max(most // max(length, 1), 1), 5)))
    values = spreads(1e-4, 3.0, 40.0)
    args["x"] = draw(tensors((batch, length, channels), values))
    args["weight"] = draw(tensors((channels, taps), values, LOW_OR_FP32))
    args["bias"] = draw(st.none() | tensors((channels,), values, LOW_OR_FP32))
    state = taps > 1 and draw(st.booleans())
    args["residual"] = draw(st.none() | tensors((batch, length, channels), values))
    args["initial_state"] = draw(tensors((rows, channels, taps - 1))) if state else None
    options: dict[str, Any] = {
        "activation": draw(st.sampled_from([None, "silu"])),
        "return_final_state": draw(st.booleans()),
    }
    return Case("random", args, options, draw(layouts(3)))
