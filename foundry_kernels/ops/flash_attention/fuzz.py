"""Random cases of flash_attention and flash_attention_varlen."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.fuzzing import ELEMENTS, layouts, sizes, spreads, tensors
from foundry_kernels.ops.flash_attention.cases import _slopes, _Starts
from foundry_kernels.testing import Arg, Case, normal

#: Scores of a case: batch * heads * queries * keys.
_SCORES = 100_000
#: Layouts of the sequences' starts: those that keep their values.
_STARTS = st.sampled_from(["contiguous", "sliced", "offset", "strided"])


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    heads = kv_heads * group
    width = draw(sizes(130, least=1) | st.sampled_from([192, 255, 256]))
    value_width = draw(st.just(width) | sizes(256, least=1))
    if op == "flash_attention":
        batch, args, lengths = draw(_dense(heads, kv_heads, width, value_width))
    else:
        batch, args, lengths = draw(_packed(heads, kv_heads, width, value_width))
    options = draw(_options()) | lengths
    if draw(st.integers(0, 2)) == 0:
        slopes = draw(st.sampled_from([(heads,), (batch, heads)]))
        args["alibi_slopes"] = Arg(slopes, draw(layouts(len(slopes))), _slopes, torch.float32, grad=False)
    if draw(st.integers(0, 2)) == 0:
        # No larger: outputs would be subnormal float16, of which the sinks' gradient is the sum.
        sinks = st.sampled_from([normal(), normal(3.0), normal(1.0, 8.0)])
        args["sinks"] = draw(tensors((heads,), sinks, (None, torch.float32)))
    ranks = [3 if op == "flash_attention" else 2] if options.get("return_lse") or options.get("return_stats") else []
    return Case("random", args, options, draw(layouts(min([*ranks, len(args["q"].shape)]))))  # type: ignore[union-attr]


@st.composite
def _options(draw: st.DrawFn) -> dict[str, Any]:
    side = st.none() | sizes(70)
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    options["align"] = draw(st.sampled_from(["bottom_right", "top_left"]))
    options["window"] = draw(st.none() | st.tuples(side, side))
    options["softcap"] = draw(st.none() | st.sampled_from([1.0, 5.0, 50.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.01, 0.3, 1.0]))
    return options | {"return_lse": draw(st.booleans()), "return_stats": draw(st.booleans())}


@st.composite
def _dense(
    draw: st.DrawFn, heads: int, kv_heads: int, width: int, value_width: int
) -> tuple[int, dict[str, Arg | None], dict[str, Any]]:
    kind = draw(st.sampled_from(["decoding", "decoding", "few", "many", "many", "many", "long", "empty"]))
    if kind == "decoding":  # a few queries, so many keys that they are split over tasks
        batch, queries = draw(st.integers(1, 2)), draw(st.integers(1, 4))
        keys = draw(st.integers(1024, max(1100, 600_000 // (batch * kv_heads * (width + value_width)))))
    elif kind == "long":  # so many queries that they are split over tasks of the backward pass
        batch, queries = 1, draw(st.integers(1024, 1200)) * kv_heads // heads + 1
        keys = draw(sizes(60, 1))
    else:
        least = int(kind != "empty")
        batch = draw(st.integers(least, 3))
        rows = max(batch, 1) * heads
        most = 4 if kind == "few" else max(draw(ELEMENTS) // (rows * width), 3)
        queries = draw(sizes(most, least))
        most = max(min(_SCORES // (rows * max(queries, 1)), draw(ELEMENTS) // (rows * width)), 3)
        keys = draw(sizes(most, least))
    args: dict[str, Arg | None] = {
        "q": draw(tensors((batch, heads, queries, width), spreads(1e-2, 5.0, 60.0))),
        "k": draw(tensors((batch, kv_heads, keys, width), spreads(1e-2, 5.0))),
        "v": draw(tensors((batch, kv_heads, keys, value_width))),
    }
    return batch, args, {}


@st.composite
def _packed(
    draw: st.DrawFn, heads: int, kv_heads: int, width: int, value_width: int
) -> tuple[int, dict[str, Arg | None], dict[str, Any]]:
    most = max(draw(ELEMENTS) // (heads * width), 3)
    tokens = sizes(min(most, 140))
    lengths = draw(st.lists(st.tuples(tokens, tokens), max_size=5))
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    queries, keys = (tuple(n[i] for n in lengths) for i in (0, 1))
    starts = (len(lengths) + 1,)
    args: dict[str, Arg | None] = {
        "q": draw(tensors((sum(queries), heads, width), spreads(1e-2, 5.0, 60.0))),
        "k": draw(tensors((sum(keys), kv_heads, width), spreads(1e-2, 5.0))),
        "v": draw(tensors((sum(keys), kv_heads, value_width))),
        "cu_seqlens_q": Arg(starts, draw(_STARTS), _Starts(queries), index, grad=False),
        "cu_seqlens_k": Arg(starts, draw(_STARTS), _Starts(keys), index, grad=False),
    }
    slack = draw(st.sampled_from([0, 0, 1, 100]))
    maxima = {f"max_seqlen_{x}": max(n, default=0) + slack for x, n in (("q", queries), ("k", keys))}
    return len(lengths), args, maxima
