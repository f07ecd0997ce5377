"""Sample inputs with masks, biases and dropout."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask
from foundry_kernels.ops.flash_attention.case_makers import (
    ALL_OPTIONS,
    DROPOUT,
    LARGEST,
    Alternating,
    PartlyBiased,
    bias_arg,
    bias_with_gaps,
    blocks,
    mask_arg,
)
from foundry_kernels.ops.flash_attention.case_makers import (
    dense_case as masked,
)
from foundry_kernels.testing import Case, normal


def _prefix_or_causal(n_batch: int, t: int, s: int) -> AttentionMask:
    """A prefix of 1, 41, 81 .. keys for the sequences, causal behind it."""
    causal = AttentionMask.from_function(lambda b, h, i, j: i >= j, None, None, t, s, "cpu")
    return AttentionMask.prefix(torch.arange(n_batch) * 40 + 1) | causal


def _documents(*lengths: int) -> AttentionMask:
    return AttentionMask.documents(torch.tensor([0, *accumulate(lengths)]))


def _name(kind: str, shape: tuple[int, ...]) -> str:
    return f"{kind}-{'.'.join(map(str, shape))}"


def _striped(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Tiles that are empty or full, others for each head."""
    return (i // 64 + j // 64 + h) % 3 > 0


#: The usual values of masks that are tensors of numbers, and their opposites.
_ENDS = {"largest": LARGEST, "lowest": -LARGEST}

MASKED = (
    *(
        masked(2, (2, 1), (35, 70), 16, _name("bool", shape), attn_mask=mask_arg(*shape), return_lse=True)
        for shape in ((2, 2, 35, 70), (2, 1, 70), (2, 1, 1, 70), (35, 70), (1, 2, 35, 1))
    ),
    *(
        masked(2, (2, 1), (35, 70), 24, _name("bias", shape), attn_mask=bias_arg(*shape), return_lse=True)
        for shape in ((2, 2, 35, 70), (1, 2, 35, 70), (2, 1, 1, 70), (35, 70), (70,), (2, 35, 1), (2, 2, 1, 1), ())
    ),
    *(
        masked(2, (2, 1), (33, 40), 16, f"bias-{layout}", attn_mask=bias_arg(2, 2, 33, 40, layout=layout), causal=True)
        for layout in ("swapped", "sliced", "offset", "expanded", "strided")
    ),
    *(
        masked(2, (2, 1), (33, 40), 16, f"bool-{layout}", attn_mask=mask_arg(2, 2, 33, 40, layout=layout))
        for layout in ("swapped", "sliced", "offset", "expanded", "strided")
    ),
    masked(1, (4, 2), (130, 200), 64, "bool-blocks", attn_mask=mask_arg(130, 200, values=blocks), return_lse=True),
    masked(1, (2, 1), (65, 65), 32, "bool-causal", attn_mask=mask_arg(65, 65), causal=True, return_lse=True),
    masked(1, (2, 1), (65, 65), 32, "bool-stats", attn_mask=mask_arg(65, 65), sinks=normal(), return_stats=True),
    masked(1, (2, 1), (40, 70), 32, "bias-gaps", attn_mask=bias_arg(40, 70, values=bias_with_gaps), return_lse=True),
    masked(1, (2, 1), (40, 70), 32, "bias-frozen", attn_mask=bias_arg(2, 40, 70, grad=False), causal=True),
    masked(1, (2, 1), (40, 70), 32, "bias-only", attn_mask=bias_arg(2, 40, 70), frozen="qkv"),
    masked(1, (2, 1), (33, 65), 64, "bias-large", attn_mask=bias_arg(33, 65, values=normal(60.0)), return_lse=True),
    *(
        masked(1, (1, 1), (9, 72), 8, f"bias-{name}", attn_mask=bias_arg(9, 72, values=PartlyBiased(value)))
        for name, value in (("50", 50.0), ("-50", -50.0), ("1e4", 1e4), ("-1e4", -1e4), *_ENDS.items())
    ),
    *(  # beside it float32 loses what float64 does not lose; not scores of 0
        masked(1, (1, 1), (9, 72), 8, f"bias-{value:.0e}-alone", q_values=normal(0.0),
               attn_mask=bias_arg(9, 72, values=PartlyBiased(value)))
        for value in (1e10, -1e10)
    ),
    *(
        masked(1, (2, 1), tokens, 8, f"bias-{name}-{note}", attn_mask=bias_arg(*tokens, values=PartlyBiased(value)),
               **options)
        for name, value in _ENDS.items()
        for tokens, note, options in (
            ((9, 72), "stats", {"sinks": normal(), "return_lse": True, "return_stats": True}),
            ((9, 72), "all-options", {"alibi_slopes": (2,), "sinks": normal(), **ALL_OPTIONS}),
            ((4, 130), "chunk", {"return_lse": True}),
            ((4, 1100), "chunk-split", {"return_lse": True, "return_stats": True}),
        )
    ),
    masked(1, (2, 1), (9, 72), 8, "sinks-largest", sinks=Alternating(LARGEST), return_lse=True),
    masked(1, (2, 1), (33, 65), 64, "bias-float32", attn_mask=bias_arg(2, 33, 65, dtype=torch.float32)),
    masked(2, (4, 2), (1, 150), 16, "bias-decode", attn_mask=bias_arg(2, 1, 1, 150)),
    masked(2, (4, 2), (3, 150), 16, "bool-decode", attn_mask=mask_arg(2, 1, 1, 150), causal=True, return_lse=True),
    masked(1, (2, 1), (65, 70), 32, "tiles-prefix-or-causal", attn_mask=_prefix_or_causal(1, 65, 70), return_lse=True),
    masked(3, (4, 2), (150, 150), 32, "tiles-batch", attn_mask=_prefix_or_causal(3, 150, 150), return_lse=True),
    masked(2, (4, 2), (300, 300), 40, "tiles-documents", attn_mask=_documents(3, 97, 160, 40), causal=True),
    masked(2, (4, 2), (2, 150), 16, "tiles-decode", attn_mask=AttentionMask.prefix(torch.tensor([0, 100]))),
    masked(
        2, (4, 2), (130, 200), 32, "tiles-heads", window=(90, 20), return_lse=True,
        attn_mask=AttentionMask.from_function(_striped, 2, 4, 130, 200, "cpu"),
    ),
    *(
        masked(1, (2, 1), tokens, d, "dropout", return_lse=True, **DROPOUT)
        for tokens, d in (((65, 97), 32), ((130, 33), 32), ((1, 300), 16), ((3, 90), 40))
    ),
    masked(2, (3, 1), (70, 70), 24, "dropout-causal", causal=True, return_stats=True, **DROPOUT),
    masked(1, (2, 1), (40, 40), 32, "dropout-0.9", causal=True, dropout_p=0.9, dropout_seed=3),
    masked(1, (2, 1), (40, 40), 32, "dropout-0", dropout_p=0.0, dropout_seed=3),
    masked(
        2, (4, 2), (50, 70), 40, "all-options-bias-dropout", alibi_slopes=(2, 4), sinks=normal(),
        attn_mask=bias_arg(1, 4, 50, 70), **ALL_OPTIONS, **DROPOUT,
    ),
    masked(
        2, (4, 2), (70, 50), 40, "all-options-bool-dropout", alibi_slopes=(4,), sinks=normal(), return_stats=True,
        attn_mask=mask_arg(2, 1, 70, 50), **ALL_OPTIONS, **DROPOUT,
    ),
    masked(
        1, (4, 2), (3, 90), 40, "chunk-all-options-bias-dropout", alibi_slopes=(4,), sinks=normal(),
        attn_mask=bias_arg(4, 3, 90), **ALL_OPTIONS, **DROPOUT,
    ),
    masked(0, (2, 1), (5, 7), 32, "bias-no-batch", attn_mask=bias_arg(5, 7)),
    masked(2, (2, 1), (5, 0), 32, "bias-no-keys", attn_mask=bias_arg(5, 0), return_lse=True),
)  # fmt: skip


def masked_cases_to_compile() -> tuple[Case, ...]:
    """Each of them alone, where tiles are the largest that may fit, and all that may meet."""
    shape, documents = (2, (8, 2), (512, 512)), _documents(100, 156, 256)
    alone: dict[str, dict[str, Any]] = {
        "bias": {"attn_mask": bias_arg(8, 512, 512)},
        "bool": {"attn_mask": mask_arg(2, 1, 512, 512)},
        "tiles": {"attn_mask": documents},
        "dropout": DROPOUT,
    }
    everything = {**ALL_OPTIONS, **DROPOUT, "alibi_slopes": (8,), "sinks": normal(), "return_stats": True}
    bias = bias_arg(8, 512, 512)
    return (
        *(masked(*shape, d, name, **options) for d in (64, 128) for name, options in alone.items()),
        masked(*shape, 512, "bias", attn_mask=bias, causal=True),
        masked(*shape, 512, "dropout", causal=True, **DROPOUT),
        *(masked(*shape, d, "bias-dropout", attn_mask=bias, causal=True, **DROPOUT) for d in (64, 128, 256)),
        *(masked(*shape, d, "tiles-dropout", attn_mask=documents, causal=True, **DROPOUT) for d in (128, 256)),
        *(masked(*shape, d, "all-options-bias-dropout", attn_mask=bias, **everything) for d in (64, 128, 256)),
        masked(1, (8, 2), (4, 2048), 128, "few-queries-all", attn_mask=bias_arg(8, 4, 2048), **everything),
        masked(1, (8, 2), (4, 2048), 128, "few-queries-tiles", attn_mask=AttentionMask.prefix(torch.tensor([900]))),
    )
