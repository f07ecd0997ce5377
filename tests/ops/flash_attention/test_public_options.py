"""The options of attention as one object, which the public functions make."""

from __future__ import annotations

import torch
from attention_inputs import plain_options
from torch import Tensor

from foundry_kernels.core.registry import override
from foundry_kernels.ops.flash_attention import (
    FLASH_ATTENTION,
    FLASH_ATTENTION_VARLEN,
    flash_attention,
    flash_attention_varlen,
)
from foundry_kernels.ops.flash_attention.options import AttentionOptions


def test_the_public_functions_make_them() -> None:
    """Defaults, a causal mask, a window with one side and an alignment, as a backend gets them."""
    made: list[AttentionOptions] = []

    def record(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> Tensor:
        made.append(options)
        return q

    q, k, sinks = torch.zeros(9, 2, 16), torch.zeros(9, 1, 16), torch.zeros(2)
    cu_seqlens = torch.tensor([0, 4, 9])
    with override(FLASH_ATTENTION, "reference", fn=record), override(FLASH_ATTENTION_VARLEN, "reference", fn=record):
        flash_attention(*(x.transpose(0, 1)[None] for x in (q, k[:7], k[:7])), backend="reference")
        flash_attention_varlen(
            *(q, k, k, cu_seqlens, cu_seqlens, 5, 8), causal=True, window=(3, None), scale=0.5, softcap=2.0,
            sinks=sinks, align="top_left", deterministic=False, return_lse=True, backend="reference",
        )  # fmt: skip
    dense, packed = made
    assert dense == plain_options(9, 7, 0.25)
    assert packed == plain_options(
        5, 8, 0.5, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, window_left=3, window_right=0, softcap=2.0,
        sinks=sinks, bottom_right=False, deterministic=False, return_lse=True,
    )  # fmt: skip
    assert (dense.packed, packed.packed) == (False, True)
