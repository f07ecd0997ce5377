"""Random cases of rope and qk_norm_rope."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.rope.cases import _cos, _rows_below, _sin
from foundry_kernels.testing import Arg, Case, normal
from foundry_kernels.testing.fuzzing import ELEMENTS, LOW_OR_FP32, layouts, sizes, spreads, tensors


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    width = draw(sizes(257, least=2))
    batch, tokens = draw(st.integers(0, 3)), draw(sizes(max(draw(ELEMENTS) // (8 * width), 2)))
    heads, kv_heads = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    values = spreads(1e-3, 30.0, 1e3)
    args: dict[str, Arg | None] = {
        "q": draw(tensors((batch, heads, tokens, width), values)),
        "k": draw(tensors((batch, kv_heads, tokens, width), values)),
    }
    options: dict[str, Any] = {"interleaved": draw(st.booleans())}
    if op == "qk_norm_rope":
        options |= {"eps": draw(st.sampled_from([1e-6, 0.1])), "round_before_weight": draw(st.booleans())}
        for name in ("q_weight", "k_weight"):
            args[name] = draw(st.none() | tensors((width,), st.just(normal(0.3, 1.0)), LOW_OR_FP32))
        if args["q_weight"] is not None and args["k_weight"] is not None:
            options["weight_offset"] = draw(st.sampled_from([0.0, 1.0]))

    half = draw(st.integers(1, width // 2))
    kind = draw(st.sampled_from(["table", "positions", "rows"]))
    if kind == "rows":
        table: tuple[int, ...] = (draw(st.sampled_from([1, batch])), tokens, half)
    else:
        table = (tokens + draw(sizes(40, least=1)), half)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    for name, function in (("cos", _cos), ("sin", _sin)):
        args[name] = Arg(table, draw(layouts(len(table))), function, dtype, grad=False)
    if kind == "positions":
        shape = draw(st.sampled_from([(tokens,), (1, tokens), (batch, tokens)]))
        index = draw(st.sampled_from([torch.int32, torch.int64]))
        args["positions"] = Arg(shape, draw(layouts(len(shape))), _rows_below(table[0]), index, grad=False)
    return Case("random", args, options, draw(layouts(4)))
