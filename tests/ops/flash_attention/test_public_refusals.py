"""Attention: what is refused, by the name of the argument and before any kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_inputs import DV, HK, B, D, H, S, T, attend, inputs
from torch import Tensor

from foundry_kernels.ops.flash_attention import flash_attention, flash_attention_varlen
from foundry_kernels.ops.flash_attention.attention_mask import AttentionMask


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


Bad = list[tuple[type[Exception], str, dict[str, Any]]]
OPTIONS: Bad = [
    (TypeError, "window must be a pair", {"window": 4}),
    (ValueError, "window's left side must be >= 0, or None or -1 for no bound; got -2", {"window": (-2, 0)}),
    (ValueError, "window's right side must be >= 0, or None or -1 for no bound; got -3", {"window": (None, -3)}),
    (TypeError, "window's left side must be an int; got float", {"window": (1.0, 0)}),
    (TypeError, "window's right side must be an int; got bool", {"window": (1, True)}),
    (TypeError, "scale must be a float; got Tensor", {"scale": torch.tensor(1.0)}),
    (ValueError, "align must be one of bottom_right, top_left; got 'left'", {"align": "left"}),
    (TypeError, "causal must be a bool; got NoneType", {"causal": None}),
    (TypeError, "alibi_slopes must be float32 .*bfloat16", {"alibi_slopes": zeros(H, dtype=torch.bfloat16)}),
    (TypeError, "alibi_slopes must be float32 .*float64", {"alibi_slopes": zeros(H, dtype=torch.float64)}),
    (ValueError, "alibi_slopes must be .H. = .4,. or .B, H. = .2, 4.; got .2,.", {"alibi_slopes": zeros(HK)}),
    (ValueError, "alibi_slopes must be .*got .3, 4.", {"alibi_slopes": zeros(B + 1, H)}),
    (ValueError, "alibi_slopes take no gradient", {"alibi_slopes": zeros(H).requires_grad_()}),
    (ValueError, "sinks must have shape .4,.", {"sinks": zeros(HK)}),
    (TypeError, "sinks may be float64 only where q is", {"sinks": zeros(H, dtype=torch.float64)}),
]
_MASK = zeros(T, S, dtype=torch.bool)
DENSE: Bad = [
    (TypeError, "attn_mask must be a torch.Tensor or an AttentionMask; got str", {"attn_mask": "causal"}),
    (TypeError, "attn_mask must be bool, .*; got torch.int64", {"attn_mask": zeros(T, S, dtype=torch.int64)}),
    (TypeError, "attn_mask must be bool, .*; got torch.uint8", {"attn_mask": zeros(T, S, dtype=torch.uint8)}),
    (TypeError, "attn_mask may be float64 only where q is", {"attn_mask": zeros(T, S, dtype=torch.float64)}),
    (ValueError, r"attn_mask must broadcast to .*= \(2, 4, 5, 7\); got shape \(5, 6\)", {"attn_mask": zeros(T, S - 1)}),
    (ValueError, "attn_mask must broadcast to .*got shape .3, 1, 5, 7", {"attn_mask": zeros(B + 1, 1, T, S)}),
    (ValueError, "attn_mask must broadcast to .*got shape .2, 2, 5, 7", {"attn_mask": zeros(B, HK, T, S)}),
    (ValueError, "attn_mask must broadcast to", {"attn_mask": zeros(1, 1, 1, T, S)}),
    (ValueError, "attn_mask must be on q's device cpu; got meta", {"attn_mask": AttentionMask(_MASK).to("meta")}),
    (ValueError, "attn_mask must broadcast to .*got a mask of", {"attn_mask": AttentionMask(_MASK[:, :6])}),
    (ValueError, "attn_mask must broadcast to .*got a mask of", {"attn_mask": AttentionMask(_MASK.expand(3, 1, T, S))}),
    (ValueError, "q must be .B, H, T, D.; got shape .4, 5, 6.", {"q": zeros(H, T, D)}),
    (ValueError, "k must be .B, Hk, S, D.", {"k": zeros(HK, S, D)}),
    (ValueError, "v must be .B, Hk, S, Dv.", {"v": zeros(HK, S, D)}),
    (
        ValueError,
        "k must have q's dtype torch.float32; got torch.float16",
        {"k": zeros(B, HK, S, D, dtype=torch.float16)},
    ),
    (ValueError, "v must have q's dtype", {"v": zeros(B, HK, S, DV, dtype=torch.bfloat16)}),
    (ValueError, "k must have q's batch size 2", {"k": zeros(B + 1, HK, S, D), "v": zeros(B + 1, HK, S, DV)}),
    (ValueError, "v must be .B, Hk, S, Dv. with k's", {"v": zeros(B, HK, S + 1, DV)}),
    (ValueError, "v must be .B, Hk, S, Dv. with k's", {"v": zeros(B, H, S, DV)}),
    (ValueError, "multiple of k's 3 heads; got 4", {"k": zeros(B, 3, S, D), "v": zeros(B, 3, S, DV)}),
    (ValueError, "multiple of k's 0 heads; got 4", {"k": zeros(B, 0, S, D), "v": zeros(B, 0, S, DV)}),
    (ValueError, "k must have q's head dimension 6; got 8", {"k": zeros(B, HK, S, 8)}),
    (ValueError, "head dimension of at least 1", {"q": zeros(B, H, T, 0), "k": zeros(B, HK, S, 0)}),
    (ValueError, "head dimension of at least 1", {"v": zeros(B, HK, S, 0)}),
    (
        ValueError,
        "q must have a head dimension of at most 512; got 513",
        {"q": zeros(B, H, T, 513), "k": zeros(B, HK, S, 513)},
    ),
    (ValueError, "v must have a head dimension of at most 512; got 600", {"v": zeros(B, HK, S, 600)}),
]


@pytest.mark.parametrize(("error", "message", "arguments"), DENSE + OPTIONS, ids=range(len(DENSE + OPTIONS)))
def test_bad_input_is_refused(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    good = {"q": zeros(B, H, T, D), "k": zeros(B, HK, S, D), "v": zeros(B, HK, S, DV)}
    with pytest.raises(error, match=message):
        flash_attention(**{**good, **arguments})


def cu_seqlens(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


VARLEN: Bad = [
    (ValueError, "q must be .total_q, H, D.", {"q": zeros(1, 9, H, D)}),
    (ValueError, "k must be .total_k, Hk, D.", {"k": zeros(9, D)}),
    (ValueError, "v must be .total_k, Hk, Dv. with k's", {"v": zeros(8, HK, DV)}),
    (TypeError, "cu_seqlens_q must be int32 or int64; got torch.float32", {"cu_seqlens_q": zeros(3)}),
    (TypeError, "cu_seqlens_k must be a torch.Tensor; got list", {"cu_seqlens_k": [0, 9]}),
    (ValueError, "cu_seqlens_q must be .B . 1.; got shape .1, 3.", {"cu_seqlens_q": cu_seqlens(0, 4, 9)[None]}),
    (ValueError, "cu_seqlens_q must be .B . 1., starting with 0; got shape .0,.", {"cu_seqlens_q": cu_seqlens()}),
    (ValueError, "cu_seqlens_k must be on k's device", {"cu_seqlens_k": cu_seqlens(0, 4, 9).to("meta")}),
    (
        ValueError,
        "cu_seqlens_k must have shape .3,. .that of cu_seqlens_q.; got .2,.",
        {"cu_seqlens_k": cu_seqlens(0, 9)},
    ),
    (ValueError, "cu_seqlens_q must start at 0", {"cu_seqlens_q": cu_seqlens(1, 4, 9)}),
    (
        ValueError,
        "cu_seqlens_q must start at 0, .*end at the 9 packed tokens; got .0, 4, 8.",
        {"cu_seqlens_q": cu_seqlens(0, 4, 8)},
    ),
    (ValueError, "cu_seqlens_k must .*never decrease", {"cu_seqlens_k": cu_seqlens(0, 10, 9)}),
    (ValueError, "max_seqlen_q must be at least the longest sequence, 5; got 4", {"max_seqlen_q": 4}),
    (ValueError, "max_seqlen_k must be >= 0; got -1", {"max_seqlen_k": -1}),
    (TypeError, "max_seqlen_k must be an int; got Tensor", {"max_seqlen_k": torch.tensor(5)}),
    (ValueError, "q must have a head dimension of at most 512", {"q": zeros(9, H, 520), "k": zeros(9, HK, 520)}),
    (ValueError, "v must have a head dimension of at most 512; got 513", {"v": zeros(9, HK, 513)}),
    (ValueError, "k must have q's dtype", {"k": zeros(9, HK, D, dtype=torch.float16)}),
    (ValueError, "multiple of k's 3 heads; got 4", {"k": zeros(9, 3, D), "v": zeros(9, 3, DV)}),
    (ValueError, "cu_seqlens_q must start at 0, .*got .0, 4, 12.", {"cu_seqlens_q": cu_seqlens(0, 4, 12)}),
]


@pytest.mark.parametrize(("error", "message", "arguments"), VARLEN + OPTIONS, ids=range(len(VARLEN + OPTIONS)))
def test_bad_packed_input_is_refused(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    good = {"q": zeros(9, H, D), "k": zeros(9, HK, D), "v": zeros(9, HK, DV)}
    lengths = {
        "cu_seqlens_q": cu_seqlens(0, 4, 9),
        "cu_seqlens_k": cu_seqlens(0, 4, 9),
        "max_seqlen_q": 5,
        "max_seqlen_k": 5,
    }
    with pytest.raises(error, match=message):
        flash_attention_varlen(**{**good, **lengths, **arguments})


def test_slopes_that_require_a_gradient_serve_where_none_is_taken() -> None:
    q, k, v = inputs(dtype=torch.float32)
    with torch.no_grad():
        attend(q, k, v, alibi_slopes=zeros(H).requires_grad_())
