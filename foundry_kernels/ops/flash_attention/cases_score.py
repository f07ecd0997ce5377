"""Sample inputs with a score function. None has captured tensors, which a case has no arguments for."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foundry_kernels.ops.flash_attention.case_makers import ALL_OPTIONS, DROPOUT, dense_case, mask_arg, packed_case
from foundry_kernels.ops.flash_attention.cases_paged import paged_case
from foundry_kernels.testing import normal


def distances(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """ALiBi, with slopes that depend on the sequence too."""
    return score - 0.05 * (h + b + 1) * (q_idx - kv_idx).abs()


def bent_and_hidden(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    """Hides one pair of five and, of the first head, the sixth query from all keys; derivatives are at most 1."""
    bent = torch.where((q_idx + 2 * kv_idx) % 3 == 0, 0.5 * torch.tanh(score), distances(score, b, h, q_idx, kv_idx))
    hidden = ((q_idx + kv_idx) % 5 == 4) | ((h == 0) & (q_idx == 5))
    return torch.where(hidden, -math.inf, bent)


SCORED = (
    dense_case(2, (4, 2), (33, 65), 32, "score-mod", score_mod=distances, return_lse=True),
    dense_case(2, (4, 2), (65, 65), 40, "score-mod-bent", score_mod=bent_and_hidden, causal=True, return_stats=True),
    dense_case(2, (4, 2), (1, 90), 64, "score-mod-decode", score_mod=distances),
    dense_case(2, (4, 2), (3, 90), 40, "score-mod-chunk", score_mod=bent_and_hidden, causal=True, return_lse=True),
    dense_case(2, (2, 1), (40, 70), 32, "score-mod-mask", score_mod=distances, attn_mask=mask_arg(2, 1, 40, 70)),
    dense_case(2, (2, 1), (40, 70), 32, "score-mod-dropout", score_mod=distances, return_lse=True, **DROPOUT),
    dense_case(
        2, (4, 2), (50, 70), 40, "score-mod-all-options", score_mod=bent_and_hidden, alibi_slopes=(2, 4),
        sinks=normal(), batch_invariant=True, **ALL_OPTIONS,
    ),
)  # fmt: skip

SCORED_PACKED = (
    packed_case((17, 0, 40), (33, 5, 40), (4, 2), 32, "score-mod", score_mod=bent_and_hidden, causal=True),
    packed_case(
        (15, 1, 30), (10, 5, 34), (4, 2), 40, "score-mod-all-options", score_mod=distances, alibi_slopes=(3, 4),
        sinks=normal(), **ALL_OPTIONS, **DROPOUT,
    ),
    paged_case((1, 5), (30, 40), (4, 2), 32, 16, "score-mod", score_mod=bent_and_hidden, leftpad=(3, 0)),
)  # fmt: skip
