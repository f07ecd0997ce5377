"""Sample inputs, and the size of what a result sums; the parity suite enumerates this."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention import reference
from foundry_kernels.ops.flash_attention.bench import CuSeqlens, bench_case
from foundry_kernels.ops.flash_attention.checks import make_options
from foundry_kernels.testing import Arg, Case, Values, normal


def alibi_slopes_of(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """A geometric series over the heads, another for each sequence."""
    slopes = 2.0 ** (-8.0 * torch.arange(1, shape[-1] + 1, dtype=torch.float64) / shape[-1])
    return slopes if len(shape) == 1 else slopes * torch.arange(1, shape[0] + 1, dtype=torch.float64)[:, None]


def _one_huge(g: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Normal values, one key a hundred times as large: its row of scores decides every softmax."""
    x = torch.randn(shape, generator=g, dtype=torch.float64)
    x[:, :, shape[2] // 3] *= 100.0
    return x


def _case(
    b: int,
    heads: tuple[int, int],
    tokens: tuple[int, int],
    head_dim: int,
    note: str = "",
    *,
    head_dim_v: int | None = None,
    layout: str = "contiguous",
    k_layout: str | None = None,
    v_layout: str | None = None,
    cotangent: str = "contiguous",
    q_values: Values | None = None,
    k_values: Values | None = None,
    alibi_slopes: tuple[int, ...] | None = None,
    sinks: Values | None = None,
    frozen: str = "",
    interpreted: bool = True,
    **options: Any,
) -> Case:
    """heads: (H, Hk); tokens: (T, S); alibi_slopes: their shape; frozen: letters of inputs without gradient."""
    (h, hk), (t, s), dv = heads, tokens, head_dim_v or head_dim
    normal_values = normal()
    args: dict[str, Arg | None] = {
        "q": Arg((b, h, t, head_dim), layout, q_values or normal_values, grad="q" not in frozen),
        "k": Arg((b, hk, s, head_dim), k_layout or layout, k_values or normal_values, grad="k" not in frozen),
        "v": Arg((b, hk, s, dv), v_layout or layout, grad="v" not in frozen),
    }
    if alibi_slopes is not None:
        args["alibi_slopes"] = Arg(alibi_slopes, values=alibi_slopes_of, dtype=torch.float32, grad=False)
    if sinks is not None:
        args["sinks"] = Arg((h,), values=sinks, grad="s" not in frozen)
    id = f"{b}x{h}.{hk}x{t}.{s}x{head_dim}" + ("-" + note if note else "")
    return Case(id, args, options, cotangent, interpreted)


def _varlen(
    lengths_q: tuple[int, ...],
    lengths_k: tuple[int, ...],
    heads: tuple[int, int],
    head_dim: int,
    note: str = "",
    *,
    head_dim_v: int | None = None,
    layout: str = "contiguous",
    index: torch.dtype = torch.int32,
    alibi_slopes: tuple[int, ...] | None = None,
    sinks: Values | None = None,
    slack: int = 0,
    **options: Any,
) -> Case:
    """`slack` is added to the maximal lengths, which need only be bounds."""
    h, hk = heads
    shape = (len(lengths_q) + 1,)
    args: dict[str, Arg | None] = {
        "q": Arg((sum(lengths_q), h, head_dim), layout),
        "k": Arg((sum(lengths_k), hk, head_dim), layout),
        "v": Arg((sum(lengths_k), hk, head_dim_v or head_dim), layout),
        "cu_seqlens_q": Arg(shape, values=CuSeqlens(lengths_q), dtype=index, grad=False),
        "cu_seqlens_k": Arg(shape, values=CuSeqlens(lengths_k), dtype=index, grad=False),
    }
    if alibi_slopes is not None:
        args["alibi_slopes"] = Arg(alibi_slopes, values=alibi_slopes_of, dtype=torch.float32, grad=False)
    if sinks is not None:
        args["sinks"] = Arg((h,), values=sinks)
    options["max_seqlen_q"] = max(lengths_q, default=0) + slack
    options["max_seqlen_k"] = max(lengths_k, default=0) + slack
    sizes = f"{'+'.join(map(str, lengths_q))}.{'+'.join(map(str, lengths_k))}x{h}.{hk}x{head_dim}"
    return Case(sizes + ("-" + note if note else ""), args, options)


_ALL_OPTIONS: dict[str, Any] = {"causal": True, "window": (20, 3), "softcap": 3.0, "scale": 0.3, "return_lse": True}

_DENSE = (
    _case(1, (1, 1), (1, 1), 1),
    *(_case(1, (2, 1), (19, 33), d) for d in (8, 16, 40, 59, 64, 72, 96, 111, 128, 192, 256)),
    *(_case(1, (2, 1), (33, 33), d, "causal", causal=True) for d in (40, 59, 96, 111, 128, 256)),
    *(_case(1, (1, 1), (t, t), 32, "causal-lse", causal=True, return_lse=True) for t in (1, 2, 63, 65, 127, 128, 129)),
    _case(1, (2, 2), (67, 131), 32, "lse", return_lse=True),
    _case(2, (3, 1), (20, 20), 32, "group-3", causal=True),
    _case(1, (8, 2), (33, 40), 64, "group-4", causal=True),
    _case(1, (4, 4), (17, 17), 32, "group-1"),
    _case(2, (8, 1), (1, 129), 64, "decode", causal=True),
    _case(1, (2, 1), (3, 200), 64, "chunk", causal=True, return_lse=True),
    _case(1, (2, 1), (3, 200), 64, "chunk-top-left", causal=True, align="top_left", return_lse=True),
    _case(1, (4, 2), (3, 90), 40, "chunk-all-options", alibi_slopes=(4,), sinks=normal(), **_ALL_OPTIONS),
    _case(1, (4, 2), (3, 90), 40, "chunk-stats", sinks=normal(), causal=True, return_stats=True),
    _case(1, (2, 1), (50, 17), 32, "rows-without-keys", causal=True, return_lse=True),
    _case(1, (2, 1), (150, 17), 32, "tiles-without-keys", causal=True, return_lse=True),
    _case(1, (2, 1), (150, 17), 32, "tiles-without-keys-out-only", causal=True),
    _case(1, (2, 1), (50, 17), 32, "top-left", causal=True, align="top_left"),
    _case(1, (2, 1), (70, 20), 32, "window-past-the-keys", window=(5, 0), align="top_left", return_lse=True),
    *(
        _case(1, (2, 1), tokens, 32, f"window-{left}.{right}", window=(left, right), return_lse=True)
        for tokens in ((65, 65), (40, 97))
        for left, right in ((0, 0), (7, 0), (0, 9), (70, 3), (None, 5), (6, None), (None, None))
    ),
    _case(1, (2, 1), (97, 40), 32, "window-causal-rows-without-keys", window=(9, 9), causal=True, return_lse=True),
    _case(1, (2, 1), (129, 129), 32, "window-causal", window=(16, None), causal=True),
    _case(1, (2, 1), (40, 97), 32, "window-top-left", window=(8, 8), align="top_left"),
    _case(1, (2, 1), (33, 33), 32, "scale", scale=0.05),
    _case(1, (2, 1), (33, 65), 32, "softcap", softcap=5.0, return_lse=True),
    _case(1, (2, 1), (65, 65), 32, "softcap-saturated", softcap=2.0, causal=True, q_values=normal(30.0)),
    _case(2, (4, 2), (33, 65), 32, "alibi", alibi_slopes=(4,), causal=True, return_lse=True),
    _case(2, (4, 2), (65, 33), 32, "alibi-per-sequence", alibi_slopes=(2, 4)),
    _case(2, (3, 1), (33, 65), 32, "alibi-top-left", alibi_slopes=(3,), align="top_left"),
    _case(1, (4, 2), (33, 65), 32, "sinks", sinks=normal(), return_lse=True),
    _case(1, (4, 2), (65, 65), 32, "sinks-causal", sinks=normal(3.0), causal=True),
    _case(1, (2, 1), (50, 17), 32, "sinks-rows-without-keys", sinks=normal(), causal=True, return_lse=True),
    _case(1, (2, 1), (33, 33), 32, "sinks-large", sinks=normal(1.0, 60.0), return_lse=True),
    _case(1, (2, 1), (33, 33), 32, "sinks-frozen", sinks=normal(), frozen="s"),
    _case(1, (2, 1), (33, 33), 32, "sinks-only", sinks=normal(), frozen="qkv"),
    _case(2, (4, 2), (50, 70), 40, "all-options", alibi_slopes=(2, 4), sinks=normal(), **_ALL_OPTIONS),
    _case(2, (4, 2), (70, 50), 40, "all-options-rows-without-keys", alibi_slopes=(4,), sinks=normal(), **_ALL_OPTIONS),
    _case(1, (2, 1), (33, 40), 64, "head-dim-v-32", head_dim_v=32, causal=True),
    _case(1, (2, 1), (33, 40), 40, "head-dim-v-96", head_dim_v=96, causal=True),
    _case(1, (2, 1), (17, 17), 192, "head-dim-v-128", head_dim_v=128, causal=True),
    *(
        _case(2, (4, 2), (17, 33), 40, layout, layout=layout, cotangent=layout, causal=True)
        for layout in ("swapped", "sliced", "offset", "expanded", "strided")
    ),
    _case(2, (4, 2), (17, 33), 40, "mixed-layouts", layout="swapped", k_layout="sliced", v_layout="offset"),
    _case(2, (4, 2), (17, 33), 40, "mixed-layouts-2", k_layout="swapped", v_layout="strided", cotangent="swapped"),
    *(
        _case(1, (2, 1), (33, 33), 32, f"frozen-{frozen}", frozen=frozen, causal=True)
        for frozen in ("q", "k", "v", "kv", "qk")
    ),
    _case(1, (2, 1), (33, 65), 64, "logits-60", q_values=normal(60.0)),
    _case(1, (2, 1), (65, 65), 64, "logits-60-causal", q_values=normal(60.0), causal=True, return_lse=True),
    _case(1, (2, 1), (33, 65), 64, "huge-key", k_values=_one_huge, return_lse=True),
    _case(1, (2, 1), (33, 65), 64, "zero-queries", q_values=normal(0.0), causal=True),
    _case(1, (2, 1), (33, 65), 64, "mean-shift", q_values=normal(1.0, 2.0), k_values=normal(1.0, 2.0)),
    _case(1, (4, 2), (65, 97), 40, "stats", causal=True, return_stats=True),
    _case(1, (2, 1), (50, 17), 32, "stats-rows-without-keys", causal=True, return_stats=True, return_lse=True),
    _case(1, (2, 1), (50, 17), 32, "stats-sinks", causal=True, sinks=normal(), return_stats=True),
    _case(2, (4, 2), (50, 70), 40, "stats-all", alibi_slopes=(4,), sinks=normal(), return_stats=True, **_ALL_OPTIONS),
    _case(1, (2, 1), (65, 65), 64, "stats-logits-60", q_values=normal(60.0), causal=True, return_stats=True),
    _case(2, (2, 1), (5, 0), 32, "stats-no-keys", sinks=normal(), return_stats=True),
    _case(0, (2, 1), (5, 7), 32, "no-batch", return_lse=True),
    _case(1, (2, 1), (0, 7), 32, "no-queries", return_lse=True),
    _case(2, (2, 1), (5, 0), 32, "no-keys", return_lse=True),
    _case(2, (2, 1), (5, 0), 32, "no-keys-causal-sinks", causal=True, sinks=normal(), return_lse=True),
)

_PACKED = (
    _varlen((7,), (7,), (2, 1), 32),
    _varlen((1, 1, 1), (30, 1, 65), (4, 2), 64, "decode", causal=True),
    _varlen((5, 0, 70, 1), (5, 0, 70, 1), (2, 1), 32, "causal-lse", causal=True, return_lse=True),
    _varlen((5, 0, 33, 9), (9, 4, 0, 40), (4, 2), 40, "lengths-differ", return_lse=True),
    _varlen((20, 33, 3), (5, 40, 3), (2, 1), 32, "rows-without-keys", causal=True, return_lse=True),
    _varlen((20, 33, 3), (5, 40, 3), (2, 1), 32, "top-left", causal=True, align="top_left"),
    _varlen((40, 66), (40, 66), (2, 1), 32, "window-causal", causal=True, window=(9, None)),
    _varlen((40, 30), (30, 66), (2, 2), 59, "window", window=(9, 4)),
    _varlen((17, 40), (33, 40), (4, 1), 32, "alibi", alibi_slopes=(4,)),
    _varlen((17, 40), (33, 40), (4, 1), 32, "alibi-per-sequence", alibi_slopes=(2, 4), causal=True),
    _varlen((30, 0, 40), (20, 5, 44), (4, 2), 40, "all", alibi_slopes=(3, 4), sinks=normal(), **_ALL_OPTIONS),
    _varlen((17, 40), (33, 40), (2, 1), 32, "sinks", sinks=normal()),
    _varlen((17, 40), (33, 40), (2, 1), 64, "head-dim-v-32", head_dim_v=32, causal=True),
    _varlen((17, 40), (33, 40), (2, 1), 32, "int64", index=torch.int64, causal=True),
    _varlen((17, 40), (33, 40), (2, 1), 32, "loose-maximum", slack=100, causal=True),
    *(_varlen((17, 20), (17, 20), (2, 1), 40, x, layout=x) for x in ("swapped", "sliced", "offset", "strided")),
    _varlen((20, 0, 33), (5, 3, 40), (2, 1), 32, "stats", causal=True, return_lse=True, return_stats=True),
    _varlen((17, 40), (33, 40), (4, 2), 32, "stats-sinks", sinks=normal(), window=(9, 4), return_stats=True),
    _varlen((0, 0), (3, 0), (2, 1), 32, "no-queries", return_lse=True, return_stats=True),
    _varlen((3, 2), (0, 0), (2, 1), 32, "no-keys", return_lse=True),
    _varlen((), (), (2, 1), 32, "no-sequences", return_lse=True),
)

# --- every length with every kind of head, mask and head dimension ----------------------------------------------------

_TOKENS = (
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1023, 1024), (1024, 1023)),
)
_HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (2, 1)}
_MASKS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window": (64, 16)}}
_CAPS: dict[str, dict[str, Any]] = {"": {}, "-softcap": {"softcap": 15.0}}
_HEAD_DIMS = (32, 40, 59, 64, 96, 111, 128, 192, 256)


def _field(tokens: tuple[int, int], heads: str, mask: str, cap: str, head_dim: int) -> Case:
    small = tokens[0] * tokens[1] <= 16_000 and head_dim <= 64 and heads != "gqa"
    options = {**_MASKS[mask], **_CAPS[cap]}
    return _case(1, _HEADS[heads], tokens, head_dim, f"field-{mask}{cap}", interpreted=small, **options)


def _paired() -> Iterator[Case]:
    """Every length with every kind of head and mask; head dimensions and the cap take turns, so that each meets all."""
    for i, tokens in enumerate(_TOKENS):
        for j, heads in enumerate(_HEADS):
            mask = list(_MASKS)[(i + j) % 3]
            yield _field(tokens, heads, mask, list(_CAPS)[(i // 2 + j) % 2], _HEAD_DIMS[(i + 3 * j + i // 9) % 9])


def field_cases() -> Iterator[Case]:
    """The whole product, for a GPU."""
    return (_field(*one) for one in product(_TOKENS, _HEADS, _MASKS, _CAPS, _HEAD_DIMS))


CASES: dict[str, tuple[Case, ...]] = {"flash_attention": (*_DENSE, *_paired()), "flash_attention_varlen": _PACKED}


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What is compiled ahead of time by default: each row of the table of configurations, and the options that need
    most registers; of 512 tokens groups of heads are split, of 16384 they are not. (All cases take an hour.)"""
    half, single = torch.bfloat16, torch.float32
    everything = {**_ALL_OPTIONS, "alibi_slopes": (8,), "sinks": normal(), "return_stats": True}
    any_order: dict[str, Any] = {"deterministic": False}
    if op == "flash_attention":
        return (
            *((bench_case(2, 8, 2, 512, d, True), half) for d in (64, 128, 256)),
            (bench_case(2, 8, 2, 16384, 128, False), half),
            *((_case(2, (8, 2), (512, 512), d, "any-order", causal=True, **any_order), half) for d in (64, 128)),
            *(
                (_case(2, (8, 2), (512, 512), d, "any-order-window", window=(200, 30), **any_order), half)
                for d in (64, 128)
            ),
            (_case(2, (8, 2), (512, 512), 128, "window", window=(200, 30)), half),
            (_case(2, (8, 2), (512, 512), 128, "alibi", alibi_slopes=(8,), causal=True), half),  # one option alone
            (_case(2, (8, 2), (512, 512), 64, "all-options", **everything), half),
            (_case(2, (8, 2), (16384, 16384), 256, "all-options", **everything), half),
            *((_case(1, (8, 2), (t, 2048), 128, "few-queries", causal=True), half) for t in (1, 16)),
            *((_case(1, (8, 2), (4, 2048), d, "few-queries-all-options", **everything), half) for d in (64, 128, 256)),
        )
    both = ((256, 256), (256, 256), (8, 2))
    return (
        *((_varlen(*both, d, "causal", causal=True), single) for d in (64, 128, 256)),
        (_varlen(*both, 128, "all-options", **everything), half),
        (_varlen(*both, 111, "causal", causal=True), half),
        *((_varlen(*both, d, "any-order", causal=True, **any_order), half) for d in (64, 128)),
    )


#: Gradients that a kernel computes from delta, which comes from the rounded output: whatever their own dtype and size,
#: they are allowed one rounding for each row.
FROM_OUTPUT = ("q", "k", "sinks")


def of_output(
    options: Mapping[str, Any], cotangents: tuple[Tensor, ...], error: Tensor
) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """``delta = dout . out - dlse`` is all that a kernel makes of the output: it is off by as much as if lse's gradient
    were."""
    dlse = -(cotangents[0] * error).sum(-1)
    if error.dim() == 3:
        dlse = dlse.t()  # packed: out is [total, H, Dv], lse [H, total]
    rest = cotangents[1:]
    if options.get("return_lse"):
        dlse, rest = dlse + rest[0], rest[1:]
    return {**options, "return_lse": True}, (cotangents[0], dlse, *rest)


#: Two float32 roundings, as a part of what tiny() forgives a sum.
_ROUNDING = 1 / 16


def scales(
    args: Mapping[str, Tensor | None], options: Mapping[str, Any], cotangents: tuple[Tensor, ...]
) -> dict[str, float]:
    """Size of the terms that each result sums (float64 inputs), by name: the root of the sum of their squares.

    In gradients ``dout . v - delta`` of each score cancels, and so do the sums over keys (q), queries (k, v) and both
    (sinks). In all results a score is itself a sum, and the exponential multiplies its error by ``p``: large scores
    that happen to leave a small or saturated result are not compared with the size of that result.
    """
    q, k, v = (x.detach() for x in (args["q"], args["k"], args["v"]) if x is not None)
    alibi_slopes, sinks = args.get("alibi_slopes"), args.get("sinks")
    cotangents = cotangents[: 2 if options.get("return_lse") else 1]  # statistics have none
    sinks = None if sinks is None else sinks.detach()
    if "cu_seqlens_q" not in args:
        return _scales(q, k, v, alibi_slopes, sinks, options, cotangents)
    cu_seqlens_q, cu_seqlens_k = args["cu_seqlens_q"], args["cu_seqlens_k"]
    assert cu_seqlens_q is not None
    assert cu_seqlens_k is not None
    options = {name: value for name, value in options.items() if not name.startswith("max_seqlen")}
    most: dict[str, float] = {}
    parts = zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True)
    for n, ((q0, q1), (k0, k1)) in enumerate(parts):
        one = [x.transpose(0, 1)[None] for x in (q[q0:q1], k[k0:k1], v[k0:k1], cotangents[0][q0:q1])]
        into_lse = tuple(c[None, :, q0:q1] for c in cotangents[1:])
        own = alibi_slopes[n] if alibi_slopes is not None and alibi_slopes.dim() == 2 else alibi_slopes
        found = _scales(one[0], one[1], one[2], own, sinks, options, (one[3], *into_lse))
        most |= {name: max(size, most.get(name, 0.0)) for name, size in found.items()}
    return most


def _scales(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    options: Mapping[str, Any],
    cotangents: tuple[Tensor, ...],
) -> dict[str, float]:
    group = q.shape[1] // k.shape[1]
    if q.numel() == 0 or k.numel() == 0:
        return {}
    t, s = q.shape[2], k.shape[2]
    slopes = None if alibi_slopes is None else alibi_slopes.detach()
    asked = make_options(q, None, None, t, s, alibi_slopes=slopes, sinks=sinks, **options)
    scale, cap = asked.scale, asked.softcap
    whole = asked._replace(window_left=None, window_right=None)
    scores, unmasked = reference.scores(q, k, asked), reference.scores(q, k, whole)
    unbiased = reference.scores(q, k, whole._replace(alibi_slopes=None))
    hidden = scores == -torch.inf
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    error2 = scale**2 * q.square() @ k.square().transpose(-1, -2)  # of a score, as tiny() counts errors
    if cap is not None:
        error2 = error2 * (1 - (unbiased / cap).square()).square()
    error2 = error2 + (_ROUNDING * (unbiased - unmasked)).square()
    sink = scores.new_full((*scores.shape[:-1], 1), -torch.inf)
    if sinks is not None:
        sink = sink.masked_fill(~hidden.all(-1, keepdim=True), 0.0) + sinks[:, None, None]
    every = torch.cat([scores, sink], -1)
    lse = every.logsumexp(-1, keepdim=True)
    every_p = every.softmax(-1).nan_to_num(0.0)  # a row without keys is 0 / 0
    error2 = torch.cat([error2, torch.zeros_like(sink)], -1)
    error2 = error2 + (_ROUNDING * (every.abs() + lse.abs())).square().nan_to_num(0.0, posinf=0.0)
    p, p_sink = every_p[..., :-1], every_p[..., -1:]
    out = p @ v
    kept = _output_scales(options, every, every_p, error2, out, v)
    found = {f"output {i}": float(x.max().sqrt()) for i, x in enumerate(kept)}
    error2 = error2 + (every_p.square() * error2).sum(-1, keepdim=True)  # of a weight's logarithm: score - lse

    dout2 = cotangents[0].square()
    delta2 = (dout2 * (out.square() + kept[0])).sum(-1, keepdim=True)
    if len(cotangents) > 1:
        delta2 = delta2 + cotangents[1].square()[..., None]
    p2 = p.square() * (1 + error2[..., :-1])
    ds2 = p2 * (dout2 @ v.square().transpose(-1, -2) + delta2)

    def over_group(squares: Tensor) -> float:
        return float(squares.unflatten(1, (-1, group)).sum(2).max().sqrt())

    found |= {
        "q": scale * float((ds2 @ k.square()).max().sqrt()),
        "k": scale * over_group(ds2.transpose(-1, -2) @ q.square()),
        "v": over_group(p2.transpose(-1, -2) @ dout2),
    }
    if sinks is not None:
        found["sinks"] = float((p_sink.square() * (1 + error2[..., -1:]) * delta2).sum((0, 2, 3)).max().sqrt())
    return found


def _output_scales(
    options: Mapping[str, Any], scores: Tensor, p: Tensor, error2: Tensor, out: Tensor, v: Tensor
) -> list[Tensor]:
    """The squares of what errors of the scores (the sink's last) leave in each output: ``p_j (v_j - y)``, ``p_j`` and
    ``p_j (log p_j + H)`` times that of score j, and that of the largest score itself."""
    weighted2 = p.square() * error2
    keys2 = weighted2[..., :-1]
    in_out = keys2 @ v.square() - 2 * out * (keys2 @ v) + weighted2.sum(-1, keepdim=True) * out.square()
    kept = [in_out.clamp_min(0.0)]
    if options.get("return_lse"):
        kept.append(weighted2.sum(-1))
    if options.get("return_stats"):
        log_p = p.log().nan_to_num(0.0, neginf=0.0)
        entropy = -(p * log_p).sum(-1, keepdim=True)
        # and a rounding of the sum of exponentials, which is at least 1, under the logarithm
        kept.append((weighted2 * (log_p + entropy).square()).sum(-1) + _ROUNDING**2)
        kept.append(error2.gather(-1, scores[..., :-1].argmax(-1, keepdim=True)))
    return kept
