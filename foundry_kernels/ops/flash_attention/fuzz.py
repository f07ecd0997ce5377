"""Random cases of flash_attention and flash_attention_varlen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.bench import CuSeqlens
from foundry_kernels.ops.flash_attention.case_makers import (
    LARGEST,
    PartlyBiased,
    alibi_slopes_of,
    bias_with_gaps,
    blocks,
    bool_mask,
)
from foundry_kernels.ops.flash_attention.cases_paged import BlockTable, Integers
from foundry_kernels.testing import Arg, Case, Values, alike, normal, uniform
from foundry_kernels.testing.fuzzing import ELEMENTS, layouts, sizes, spreads, tensors

#: At most so many scores in a case: batch * n_heads * seqlen_q * seqlen_k.
_SCORES = 100_000
#: Layouts of cu_seqlens: those that keep their values.
_CU_SEQLENS_LAYOUTS = st.sampled_from(["contiguous", "sliced", "offset", "strided"])

#: With q and k of these a row has one dominant key, or nearly.
_SHARP = st.sampled_from([uniform(1.0), uniform(3.0), uniform(9.0)])
_QUERIES = spreads(1e-2, 5.0, 60.0) | _SHARP
_LARGE_BIASES = [PartlyBiased(sign * size) for size in (50.0, 1e4, LARGEST) for sign in (-1, 1)]
#: Where keys are alike, the gradients of what is far from 0 cancel.
_VALUES = st.sampled_from([normal(), normal(), normal(1.0, 4.0), uniform(3.0)])


def _keys(tokens: int) -> st.SearchStrategy[Values]:
    """tokens: their dimension."""
    return spreads(1e-2, 5.0) | _SHARP | st.just(uniform(9.0)) | st.just(alike(tokens))


@st.composite
def random_case(draw: st.DrawFn, op: str) -> Case:
    n_kv_heads, group = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3, 4, 8]))
    n_heads = n_kv_heads * group
    head_dim = draw(sizes(130, least=1) | st.sampled_from([192, 255, 256, 257, 320, 512]))
    head_dim_v = draw(st.just(head_dim) | sizes(256, least=1) | st.sampled_from([320, 511, 512]))
    if op == "flash_attention":
        batch, args, lengths = draw(_dense(n_heads, n_kv_heads, head_dim, head_dim_v))
    else:
        kind = draw(st.sampled_from([_packed, _packed, _paged]))
        batch, args, lengths = draw(kind(n_heads, n_kv_heads, head_dim, head_dim_v))
    options = draw(_options()) | lengths
    if draw(st.integers(0, 2)) == 0:
        shape = draw(st.sampled_from([(n_heads,), (batch, n_heads)]))
        args["alibi_slopes"] = Arg(shape, draw(layouts(len(shape))), alibi_slopes_of, torch.float32, grad=False)
    if draw(st.integers(0, 2)) == 0:
        # No larger: outputs would be subnormal float16, of which the sinks' gradient is the sum.
        sinks = st.sampled_from([normal(), normal(3.0), normal(1.0, 8.0)])
        args["sinks"] = draw(tensors((n_heads,), sinks, (None, torch.float32)))
    if "block_table" in args:
        args = {name: None if arg is None else replace(arg, grad=False) for name, arg in args.items()}
    if op == "flash_attention" and draw(st.integers(0, 1)):
        kind = draw(st.sampled_from(["bool", "bias", "tiles"]))
        if kind == "tiles":
            options["attn_mask"] = draw(_tiles(args))
        else:
            args["attn_mask"] = draw(_mask(args, kind))
    if draw(st.integers(0, 2)) == 0 and "block_table" not in args:
        options["dropout_p"] = draw(st.sampled_from([0.0, 0.1, 0.5]))
        options["dropout_seed"] = draw(st.integers(0, 2**63 - 1))
    ranks = [3 if op == "flash_attention" else 2] if options.get("return_lse") or options.get("return_stats") else []
    return Case("random", args, options, draw(layouts(min([*ranks, len(args["q"].shape)]))))  # type: ignore[union-attr]


def _broadcast_to(args: dict[str, Arg | None]) -> tuple[int, ...]:
    """``(B, H, T, S)``."""
    q, k = args["q"], args["k"]
    assert q is not None
    assert k is not None
    return (*q.shape[:3], k.shape[2])


@st.composite
def _mask(draw: st.DrawFn, args: dict[str, Arg | None], kind: str) -> Arg:
    shape = tuple(draw(st.sampled_from([1, n])) for n in _broadcast_to(args))
    shape = shape[draw(st.integers(0, next((i for i, n in enumerate(shape) if n != 1), 4))) :]
    layout = draw(layouts(len(shape)))
    if kind == "bool":
        return Arg(
            shape,
            layout,
            draw(st.sampled_from([bool_mask, blocks])) if len(shape) > 1 else bool_mask,
            torch.bool,
            grad=False,
        )
    values = draw(st.sampled_from([normal(), normal(5.0), bias_with_gaps]) | st.sampled_from(_LARGE_BIASES))
    return Arg(shape, layout, values, draw(st.sampled_from([None, torch.float32])), draw(st.booleans()))


@st.composite
def _tiles(draw: st.DrawFn, args: dict[str, Arg | None]) -> AttentionMask:
    batch, heads, t, s = _broadcast_to(args)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    of_each = AttentionMask(
        blocks(generator, (draw(st.sampled_from([1, batch])), draw(st.sampled_from([1, heads])), t, s))
    )
    prefix = AttentionMask.prefix(torch.randint(0, s + 1, (batch,), generator=generator))
    return draw(st.sampled_from([of_each, prefix, of_each & prefix, of_each | prefix]))


@st.composite
def _options(draw: st.DrawFn) -> dict[str, Any]:
    side = st.none() | sizes(70)
    options: dict[str, Any] = {"causal": draw(st.booleans())}
    options["align"] = draw(st.sampled_from(["bottom_right", "top_left"]))
    options["window"] = draw(st.none() | st.tuples(side, side))
    options["softcap"] = draw(st.none() | st.sampled_from([1.0, 5.0, 50.0]))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.01, 0.3, 1.0]))
    options["batch_invariant"] = draw(st.sampled_from([False, False, True]))
    return options | {"return_lse": draw(st.booleans()), "return_stats": draw(st.booleans())}


@st.composite
def _dense(
    draw: st.DrawFn, n_heads: int, n_kv_heads: int, head_dim: int, head_dim_v: int
) -> tuple[int, dict[str, Arg | None], dict[str, Any]]:
    kind = draw(st.sampled_from(["decoding", "decoding", "few", "many", "many", "many", "long", "empty"]))
    if kind == "decoding":  # a few queries, and so many keys that they are split over tasks
        batch, seqlen_q = draw(st.integers(1, 2)), draw(st.integers(1, 4))
        seqlen_k = draw(st.integers(1024, max(1100, 600_000 // (batch * n_kv_heads * (head_dim + head_dim_v)))))
    elif kind == "long":  # so many queries that they are split over tasks of the backward pass
        batch, seqlen_q = 1, draw(st.integers(1024, 1200)) * n_kv_heads // n_heads + 1
        seqlen_k = draw(sizes(60, 1))
    else:
        least = int(kind != "empty")
        batch = draw(st.integers(least, 3))
        rows = max(batch, 1) * n_heads
        most = 4 if kind == "few" else max(draw(ELEMENTS) // (rows * head_dim), 3)
        seqlen_q = draw(sizes(most, least))
        most = max(min(_SCORES // (rows * max(seqlen_q, 1)), draw(ELEMENTS) // (rows * head_dim)), 3)
        seqlen_k = draw(sizes(most, least))
    args: dict[str, Arg | None] = {
        "q": draw(tensors((batch, n_heads, seqlen_q, head_dim), _QUERIES)),
        "k": draw(tensors((batch, n_kv_heads, seqlen_k, head_dim), _keys(2))),
        "v": draw(tensors((batch, n_kv_heads, seqlen_k, head_dim_v), _VALUES)),
    }
    return batch, args, {}


@st.composite
def _paged(
    draw: st.DrawFn, n_heads: int, n_kv_heads: int, head_dim: int, head_dim_v: int
) -> tuple[int, dict[str, Arg | None], dict[str, Any]]:
    most = max(draw(ELEMENTS) // (n_heads * head_dim), 3)
    tokens, few = sizes(min(most, 140)), st.integers(0, 8)
    lengths = draw(st.lists(st.tuples(draw(st.sampled_from([tokens, few])), tokens), max_size=5))
    seqlen_q, seqlen_k = (tuple(n[i] for n in lengths) for i in (0, 1))
    page_size = draw(st.integers(1, 20) | st.sampled_from([32, 64, 128]))
    table = BlockTable(seqlen_k, page_size, draw(st.sampled_from([0, 0, 1, 2])))
    index, batch = draw(st.sampled_from([torch.int32, torch.int64])), len(lengths)
    layout = st.sampled_from(["contiguous", "swapped", "sliced", "offset"])  # columns side by side

    def pages(width: int, values: st.SearchStrategy[Values]) -> Arg:
        return Arg((table.n_pages, page_size, n_kv_heads, width), draw(layout), draw(values))

    args: dict[str, Arg | None] = {
        "q": draw(tensors((sum(seqlen_q), n_heads, head_dim), _QUERIES)),
        "k": pages(head_dim, _keys(0)),
        "v": pages(head_dim_v, _VALUES),
        "cu_seqlens_q": Arg((batch + 1,), draw(_CU_SEQLENS_LAYOUTS), CuSeqlens(seqlen_q), index),
        "cu_seqlens_k": None,
        "block_table": Arg(
            (batch, max(table.counts, default=0) + draw(st.integers(0, 2))), draw(_CU_SEQLENS_LAYOUTS), table, index
        ),
        "seqused_k": Arg((batch,), draw(_CU_SEQLENS_LAYOUTS), Integers(seqlen_k), index),
    }
    if draw(st.booleans()):
        first = tuple(draw(st.integers(0, n)) for n in seqlen_k)
        args["leftpad_k"] = Arg((batch,), draw(_CU_SEQLENS_LAYOUTS), Integers(first), index)
    return batch, args, {f"max_seqlen_{x}": max(n, default=0) for x, n in (("q", seqlen_q), ("k", seqlen_k))}


@st.composite
def _packed(
    draw: st.DrawFn, n_heads: int, n_kv_heads: int, head_dim: int, head_dim_v: int
) -> tuple[int, dict[str, Arg | None], dict[str, Any]]:
    most = max(draw(ELEMENTS) // (n_heads * head_dim), 3)
    tokens = sizes(min(most, 140))
    lengths = draw(st.lists(st.tuples(tokens, tokens), max_size=5))
    index = draw(st.sampled_from([torch.int32, torch.int64]))
    seqlen_q, seqlen_k = (tuple(n[i] for n in lengths) for i in (0, 1))
    shape = (len(lengths) + 1,)
    args: dict[str, Arg | None] = {
        "q": draw(tensors((sum(seqlen_q), n_heads, head_dim), _QUERIES)),
        "k": draw(tensors((sum(seqlen_k), n_kv_heads, head_dim), _keys(0))),
        "v": draw(tensors((sum(seqlen_k), n_kv_heads, head_dim_v), _VALUES)),
        "cu_seqlens_q": Arg(shape, draw(_CU_SEQLENS_LAYOUTS), CuSeqlens(seqlen_q), index, grad=False),
        "cu_seqlens_k": Arg(shape, draw(_CU_SEQLENS_LAYOUTS), CuSeqlens(seqlen_k), index, grad=False),
    }
    slack = draw(st.sampled_from([0, 0, 1, 100]))
    maxima = {f"max_seqlen_{x}": max(n, default=0) + slack for x, n in (("q", seqlen_q), ("k", seqlen_k))}
    return len(lengths), args, maxima
