"""Sample inputs; the parity suite enumerates this."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch

from foundry_kernels.core.contract import Saved
from foundry_kernels.ops.flash_attention.bench import bench_case
from foundry_kernels.ops.flash_attention.case_makers import (
    ALL_OPTIONS,
    BENT,
    DROPOUT,
    SCORE_OPTIONS,
    PartlyBiased,
    dense_case,
    one_huge,
    packed_case,
)
from foundry_kernels.ops.flash_attention.cases_masked import MASKED, masked_cases_to_compile
from foundry_kernels.ops.flash_attention.cases_paged import PAGED, paged_cases_to_compile
from foundry_kernels.ops.flash_attention.cases_score import SCORED, SCORED_PACKED
from foundry_kernels.ops.flash_attention.options import LACKS
from foundry_kernels.ops.flash_attention.scales import FROM_OUTPUT, of_output, scales
from foundry_kernels.testing import Case, normal

__all__ = ["CASES", "FROM_OUTPUT", "compiled_cases", "field_cases", "of_output", "scales", "why_not"]

_DENSE = (
    dense_case(1, (1, 1), (1, 1), 1),
    *(dense_case(1, (2, 1), (19, 33), d) for d in (8, 16, 40, 59, 64, 72, 96, 111, 128, 192, 256, 320, 512)),
    *(dense_case(1, (2, 1), (33, 33), d, "causal", causal=True) for d in (40, 59, 96, 111, 128, 256, 512)),
    *(
        dense_case(1, (1, 1), (t, t), 32, "causal-lse", causal=True, return_lse=True)
        for t in (1, 2, 63, 65, 127, 128, 129)
    ),
    dense_case(1, (2, 2), (67, 131), 32, "lse", return_lse=True),
    dense_case(2, (3, 1), (20, 20), 32, "group-3", causal=True),
    dense_case(1, (8, 2), (33, 40), 64, "group-4", causal=True),
    dense_case(1, (4, 4), (17, 17), 32, "group-1"),
    dense_case(2, (8, 1), (1, 129), 64, "decode", causal=True),
    dense_case(1, (2, 1), (3, 200), 64, "chunk", causal=True, return_lse=True),
    dense_case(1, (2, 1), (3, 200), 64, "chunk-top-left", causal=True, align="top_left", return_lse=True),
    dense_case(1, (4, 2), (3, 90), 40, "chunk-all-options", alibi_slopes=(4,), sinks=normal(), **ALL_OPTIONS),
    dense_case(1, (4, 2), (3, 90), 40, "chunk-stats", sinks=normal(), causal=True, return_stats=True),
    dense_case(1, (2, 1), (50, 17), 32, "rows-without-keys", causal=True, return_lse=True),
    dense_case(1, (2, 1), (150, 17), 32, "tiles-without-keys", causal=True, return_lse=True),
    dense_case(1, (2, 1), (150, 17), 32, "tiles-without-keys-out-only", causal=True),
    dense_case(1, (2, 1), (50, 17), 32, "top-left", causal=True, align="top_left"),
    dense_case(1, (2, 1), (70, 20), 32, "window-past-the-keys", window=(5, 0), align="top_left", return_lse=True),
    *(
        dense_case(1, (2, 1), tokens, 32, f"window-{left}.{right}", window=(left, right), return_lse=True)
        for tokens in ((65, 65), (40, 97))
        for left, right in ((0, 0), (7, 0), (0, 9), (70, 3), (None, 5), (6, None), (None, None))
    ),
    dense_case(1, (2, 1), (97, 40), 32, "window-causal-rows-without-keys", window=(9, 9), causal=True, return_lse=True),
    dense_case(1, (2, 1), (129, 129), 32, "window-causal", window=(16, None), causal=True),
    dense_case(1, (2, 1), (40, 97), 32, "window-top-left", window=(8, 8), align="top_left"),
    dense_case(1, (2, 1), (33, 33), 32, "scale", scale=0.05),
    *SCORE_OPTIONS,
    dense_case(2, (4, 2), (33, 65), 32, "alibi", alibi_slopes=(4,), causal=True, return_lse=True),
    dense_case(2, (4, 2), (65, 33), 32, "alibi-per-sequence", alibi_slopes=(2, 4)),
    dense_case(2, (3, 1), (33, 65), 32, "alibi-top-left", alibi_slopes=(3,), align="top_left"),
    dense_case(1, (4, 2), (33, 65), 32, "sinks", sinks=normal(), return_lse=True),
    dense_case(1, (4, 2), (65, 65), 32, "sinks-causal", sinks=normal(3.0), causal=True),
    dense_case(1, (2, 1), (50, 17), 32, "sinks-rows-without-keys", sinks=normal(), causal=True, return_lse=True),
    dense_case(1, (2, 1), (33, 33), 32, "sinks-large", sinks=normal(1.0, 60.0), return_lse=True),
    dense_case(1, (2, 1), (33, 33), 32, "sinks-frozen", sinks=normal(), frozen="s"),
    dense_case(1, (2, 1), (33, 33), 32, "sinks-only", sinks=normal(), frozen="qkv"),
    dense_case(2, (4, 2), (50, 70), 40, "all-options", alibi_slopes=(2, 4), sinks=normal(), **ALL_OPTIONS),
    dense_case(
        2, (4, 2), (70, 50), 40, "all-options-rows-without-keys", alibi_slopes=(4,), sinks=normal(), **ALL_OPTIONS
    ),
    dense_case(1, (2, 1), (33, 40), 64, "head-dim-v-32", head_dim_v=32, causal=True),
    dense_case(1, (2, 1), (33, 40), 40, "head-dim-v-96", head_dim_v=96, causal=True),
    dense_case(1, (2, 1), (17, 17), 192, "head-dim-v-128", head_dim_v=128, causal=True),
    dense_case(1, (2, 1), (33, 40), 512, "head-dim-v-64", head_dim_v=64, causal=True),
    dense_case(1, (2, 1), (33, 40), 64, "head-dim-v-512", head_dim_v=512, causal=True),
    dense_case(1, (8, 1), (1, 129), 512, "decode", causal=True),
    dense_case(1, (4, 2), (3, 90), 512, "chunk-head-dim-v-256", head_dim_v=256, causal=True, return_stats=True),
    dense_case(1, (4, 2), (40, 50), 300, "all-options", alibi_slopes=(4,), sinks=normal(), **ALL_OPTIONS),
    *(
        dense_case(2, (4, 2), (17, 33), 40, layout, layout=layout, cotangent=layout, causal=True)
        for layout in ("swapped", "sliced", "offset", "expanded", "strided")
    ),
    dense_case(2, (4, 2), (17, 33), 40, "mixed-layouts", layout="swapped", k_layout="sliced", v_layout="offset"),
    dense_case(2, (4, 2), (17, 33), 40, "mixed-layouts-2", k_layout="swapped", v_layout="strided", cotangent="swapped"),
    *(
        dense_case(1, (2, 1), (33, 33), 32, f"frozen-{frozen}", frozen=frozen, causal=True)
        for frozen in ("q", "k", "v", "kv", "qk")
    ),
    dense_case(1, (2, 1), (33, 65), 64, "logits-60", q_values=normal(60.0)),
    dense_case(1, (2, 1), (65, 65), 64, "logits-60-causal", q_values=normal(60.0), causal=True, return_lse=True),
    dense_case(1, (2, 1), (33, 65), 64, "huge-key", k_values=one_huge, return_lse=True),
    dense_case(1, (2, 1), (33, 65), 64, "zero-queries", q_values=normal(0.0), causal=True),
    dense_case(1, (2, 1), (33, 65), 64, "mean-shift", q_values=normal(1.0, 2.0), k_values=normal(1.0, 2.0)),
    dense_case(1, (4, 2), (65, 97), 40, "stats", causal=True, return_stats=True),
    dense_case(1, (2, 1), (50, 17), 32, "stats-rows-without-keys", causal=True, return_stats=True, return_lse=True),
    dense_case(1, (2, 1), (50, 17), 32, "stats-sinks", causal=True, sinks=normal(), return_stats=True),
    dense_case(
        2, (4, 2), (50, 70), 40, "stats-all", alibi_slopes=(4,), sinks=normal(), return_stats=True, **ALL_OPTIONS
    ),
    dense_case(1, (2, 1), (65, 65), 64, "stats-logits-60", q_values=normal(60.0), causal=True, return_stats=True),
    dense_case(2, (2, 1), (5, 0), 32, "stats-no-keys", sinks=normal(), return_stats=True),
    dense_case(2, (4, 2), (3, 90), 40, "batch-invariant-decode", causal=True, batch_invariant=True),
    dense_case(
        2,
        (4, 2),
        (50, 70),
        40,
        "batch-invariant",
        alibi_slopes=(2, 4),
        sinks=normal(),
        batch_invariant=True,
        **ALL_OPTIONS,
    ),
    dense_case(0, (2, 1), (5, 7), 32, "no-batch", return_lse=True),
    dense_case(1, (2, 1), (0, 7), 32, "no-queries", return_lse=True),
    dense_case(2, (2, 1), (5, 0), 32, "no-keys", return_lse=True),
    dense_case(2, (2, 1), (5, 0), 32, "no-keys-causal-sinks", causal=True, sinks=normal(), return_lse=True),
)

_PACKED = (
    packed_case((7,), (7,), (2, 1), 32),
    packed_case((1, 1, 1), (30, 1, 65), (4, 2), 64, "decode", causal=True),
    packed_case((5, 0, 70, 1), (5, 0, 70, 1), (2, 1), 32, "causal-lse", causal=True, return_lse=True),
    packed_case((5, 0, 33, 9), (9, 4, 0, 40), (4, 2), 40, "lengths-differ", return_lse=True),
    packed_case((20, 33, 3), (5, 40, 3), (2, 1), 32, "rows-without-keys", causal=True, return_lse=True),
    packed_case((20, 33, 3), (5, 40, 3), (2, 1), 32, "top-left", causal=True, align="top_left"),
    packed_case((40, 66), (40, 66), (2, 1), 32, "window-causal", causal=True, window=(9, None)),
    packed_case((40, 30), (30, 66), (2, 2), 59, "window", window=(9, 4)),
    packed_case((17, 40), (33, 40), (4, 1), 32, "alibi", alibi_slopes=(4,)),
    packed_case((17, 40), (33, 40), (4, 1), 32, "alibi-per-sequence", alibi_slopes=(2, 4), causal=True),
    packed_case((30, 0, 40), (20, 5, 44), (4, 2), 40, "all", alibi_slopes=(3, 4), sinks=normal(), **ALL_OPTIONS),
    packed_case((17, 40), (33, 40), (2, 1), 32, "sinks", sinks=normal()),
    packed_case((17, 40), (33, 40), (2, 1), 64, "head-dim-v-32", head_dim_v=32, causal=True),
    packed_case((17, 30), (33, 30), (2, 1), 512, "head-dim-v-320", head_dim_v=320, causal=True),
    packed_case((17, 40), (33, 40), (2, 1), 32, "int64", index=torch.int64, causal=True),
    packed_case((17, 40), (33, 40), (2, 1), 32, "loose-maximum", slack=100, causal=True),
    *(packed_case((17, 20), (17, 20), (2, 1), 40, x, layout=x) for x in ("swapped", "sliced", "offset", "strided")),
    packed_case((20, 0, 33), (5, 3, 40), (2, 1), 32, "stats", causal=True, return_lse=True, return_stats=True),
    packed_case((17, 40), (33, 40), (4, 2), 32, "stats-sinks", sinks=normal(), window=(9, 4), return_stats=True),
    packed_case((17, 0, 40), (33, 5, 40), (4, 2), 32, "dropout", causal=True, return_lse=True, **DROPOUT),
    packed_case((1, 1, 1), (30, 1, 33), (4, 2), 64, "decode-dropout", **DROPOUT),
    packed_case(
        (15, 0, 30),
        (10, 5, 34),
        (4, 2),
        40,
        "all-dropout",
        alibi_slopes=(3, 4),
        sinks=normal(),
        **ALL_OPTIONS,
        **DROPOUT,
    ),
    packed_case((1, 33, 9), (20, 33, 40), (4, 2), 40, "batch-invariant", causal=True, batch_invariant=True),
    packed_case((0, 0), (3, 0), (2, 1), 32, "no-queries", return_lse=True, return_stats=True),
    packed_case((3, 2), (0, 0), (2, 1), 32, "no-keys", return_lse=True),
    packed_case((), (), (2, 1), 32, "no-sequences", return_lse=True),
)

# --- every length with every kind of head, mask and head dimension ----------------------------------------------------

_TOKENS = (
    *((1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211)),
    *((108, 256), (256, 512), (384, 256), (640, 128), (512, 256), (1023, 1024), (1024, 1023)),
)
_HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (2, 1)}
_MASKS: dict[str, dict[str, Any]] = {"full": {}, "causal": {"causal": True}, "window": {"window": (64, 16)}}
_HEAD_DIMS = (32, 40, 59, 64, 96, 111, 128, 192, 256)


def _field(tokens: tuple[int, int], heads: str, mask: str, cap: str, head_dim: int) -> Case:
    small = tokens[0] * tokens[1] <= 16_000 and head_dim <= 64 and heads != "gqa"
    options = {**_MASKS[mask], **BENT[cap]}
    return dense_case(1, _HEADS[heads], tokens, head_dim, f"field-{mask}{cap}", interpreted=small, **options)


def _paired() -> Iterator[Case]:
    """Every length with every kind of head and mask; head dimensions and the cap take turns, so that each meets all."""
    for i, tokens in enumerate(_TOKENS):
        for j, heads in enumerate(_HEADS):
            mask = list(_MASKS)[(i + j) % 3]
            yield _field(tokens, heads, mask, list(BENT)[(i // 2 + j) % 2], _HEAD_DIMS[(i + 3 * j + i // 9) % 9])


def field_cases() -> Iterator[Case]:
    """All combinations, for a GPU."""
    return (_field(*one) for one in product(_TOKENS, _HEADS, _MASKS, BENT, (*_HEAD_DIMS, 320, 512)))


CASES: dict[str, tuple[Case, ...]] = {
    "flash_attention": (*_DENSE, *MASKED, *SCORED, *_paired()),
    "flash_attention_varlen": (*_PACKED, *PAGED, *SCORED_PACKED),
}

SAVED = dict.fromkeys(CASES, Saved(outputs=(0, 1), per_row={"q": 1}))


def why_not(case: Case, backend: str, device: str, dtype: torch.dtype | None = None) -> str | None:
    for option in LACKS.get(backend, {}).get(device, ()):
        if case.args.get(option) is not None or case.options.get(option) is not None:
            return f"does not support {option} on {device}"
    bias = None if (arg := case.args.get("attn_mask")) is None else arg.values
    lost = isinstance(bias, PartlyBiased) and abs(bias.value) > 2**31
    if lost and backend == "triton" and dtype == torch.float64:
        return "keeps lse in one float64, beside whose large maximum the sum is lost, see `join_lse`"
    return None


def compiled_cases(op: str) -> tuple[tuple[Case, torch.dtype], ...]:
    """What is compiled ahead of time by default: each row of the table of configurations, and the options that need
    most registers; of 512 tokens groups of heads are split, of 16384 they are not. (All cases take an hour.)"""
    half, single = torch.bfloat16, torch.float32
    everything = {**ALL_OPTIONS, "alibi_slopes": (8,), "sinks": normal(), "return_stats": True}
    if op == "flash_attention":
        return (
            *((bench_case(2, 8, 2, 512, d, True), half) for d in (64, 128, 256, 512)),
            *((bench_case(2, 8, 2, 16384, d, False), half) for d in (64, 128)),
            *(
                (dense_case(2, (8, 2), (512, 512), d, "batch-invariant", causal=True, batch_invariant=True), half)
                for d in (64, 128, 512)
            ),
            *((dense_case(2, (8, 2), (512, 512), d, "window", window=(200, 30)), half) for d in (64, 128)),
            (dense_case(2, (8, 2), (512, 512), 128, "alibi", alibi_slopes=(8,), causal=True), half),  # one option alone
            (dense_case(2, (8, 2), (512, 512), 64, "all-options", **everything), half),
            *((dense_case(2, (8, 2), (16384, 16384), d, "all-options", **everything), half) for d in (256, 512)),
            (dense_case(2, (8, 2), (512, 512), 512, "window", window=(200, 30)), half),
            (dense_case(2, (8, 2), (512, 512), 320, "window", window=(200, 30)), half),
            *((case, half) for case in masked_cases_to_compile()),
            *((dense_case(1, (8, 2), (t, 2048), 128, "few-queries", causal=True), half) for t in (1, 16)),
            *(
                (dense_case(1, (8, 2), (4, 2048), d, "few-queries-all-options", **everything), half)
                for d in (64, 128, 256, 512)
            ),
        )
    both = ((256, 256), (256, 256), (8, 2))
    return (
        *((packed_case(*both, d, "causal", causal=True), single) for d in (64, 128, 256, 512)),
        *((packed_case(*both, d, "all-options", **everything), half) for d in (128, 512)),
        (packed_case(*both, 512, "window", window=(200, 30)), half),
        (packed_case(*both, 111, "causal", causal=True), half),
        *((packed_case(*both, d, "causal", causal=True), half) for d in (64, 128)),
        *paged_cases_to_compile(),
    )
