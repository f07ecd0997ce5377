"""What RoPE refuses, with and without norms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from foundry_kernels.ops.rope import qk_norm_rope, rope

B, H, HK, T, D = 2, 4, 3, 5, 12


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def both(half: int = 6, **kw: Any) -> dict[str, Any]:
    return {"cos": zeros(T, half, **kw), "sin": zeros(T, half, **kw)}


BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "q must be a torch.Tensor; got list", {"q": [1.0]}),
    (TypeError, "q must be float32.*int64", {"q": zeros(B, H, T, D, dtype=torch.int64)}),
    (TypeError, "cos must be float32.*int32", {"cos": zeros(T, 6, dtype=torch.int32)}),
    (TypeError, "sin must be a torch.Tensor", {"sin": None}),
    (ValueError, "q must be .B, H, T, D.", {"q": zeros(B, T, D)}),
    (ValueError, "k must be .B, Hk, T, D.", {"k": zeros(T, D)}),
    (ValueError, "k must have q's dtype", {"k": zeros(B, HK, T, D, dtype=torch.bfloat16)}),
    (ValueError, "k must be on q's device", {"k": zeros(B, HK, T, D, device="meta")}),
    (ValueError, "k must be .*with q's", {"k": zeros(B, HK, T + 1, D)}),
    (ValueError, "k must be .*with q's", {"k": zeros(B, HK, T, D + 2)}),
    (ValueError, "k must be .*with q's", {"k": zeros(B + 1, HK, T, D)}),
    (ValueError, "cos must be .P, R/2. or", {"cos": zeros(6)}),
    (ValueError, "cos must be .P, R/2. or", {"cos": zeros(B, 1, T, 6)}),
    (ValueError, "sin must have cos's shape", {"sin": zeros(T, 5)}),
    (ValueError, "sin must have cos's dtype", {"sin": zeros(T, 6, dtype=torch.bfloat16)}),
    (ValueError, "cos must be on q's device", {"cos": zeros(T, 6, device="meta")}),
    (ValueError, "sin must be on q's device", {"sin": zeros(T, 6, device="meta")}),
    (TypeError, "float64 only where q is", both(dtype=torch.float64)),
    (ValueError, "R/2 of 1 to D/2", {"cos": zeros(T, 7), "sin": zeros(T, 7)}),
    (ValueError, "R/2 of 1 to D/2", {"cos": zeros(T, 0), "sin": zeros(T, 0)}),
    (ValueError, "R/2 of 1 to D/2", {"q": zeros(B, H, T, 0), "k": zeros(B, HK, T, 0)}),
    (ValueError, "R/2 of 1 to D/2", {"q": zeros(B, H, T, 1), "k": zeros(B, HK, T, 1), **both(0)}),
    (ValueError, "a row for each of 5 positions", {"cos": zeros(T - 1, 6), "sin": zeros(T - 1, 6)}),
    (ValueError, "cos must be .*with .2, 5.", {"cos": zeros(B + 1, T, 6), "sin": zeros(B + 1, T, 6)}),
    (ValueError, "cos must be .*with .2, 5.", {"cos": zeros(B, T + 1, 6), "sin": zeros(B, T + 1, 6)}),
    (ValueError, "take no gradient", {"cos": zeros(T, 6).requires_grad_()}),
    (ValueError, "take no gradient", {"sin": zeros(T, 6).requires_grad_()}),
    (TypeError, "positions must be int32 or int64", {"positions": zeros(T)}),
    (TypeError, "positions must be a torch.Tensor", {"positions": 3}),
    (ValueError, "positions must be .T. = .5,. or", {"positions": torch.arange(T + 1)}),
    (ValueError, "positions must be .T. = .5,. or", {"positions": zeros(B + 1, T, dtype=torch.int64)}),
    (ValueError, "positions must be on q's device", {"positions": torch.arange(T, device="meta")}),
    (
        ValueError,
        "positions must be None",
        {"cos": zeros(B, T, 6), "sin": zeros(B, T, 6), "positions": torch.arange(T)},
    ),
    (TypeError, "interleaved must be a bool; got str", {"interleaved": "yes"}),
    (ValueError, "backend must be one of auto, reference, triton, native; got 'cuda'", {"backend": "cuda"}),
]


@pytest.mark.parametrize(("error", "message", "arguments"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    good = {"q": zeros(B, H, T, D), "k": zeros(B, HK, T, D), **both()}
    with pytest.raises(error, match=message):
        rope(**{**good, **arguments})


BAD_NORMS: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "q_weight must be a torch.Tensor; got float", {"q_weight": 1.0}),
    (TypeError, "k_weight must be float32.*int64", {"k_weight": zeros(D, dtype=torch.int64)}),
    (ValueError, r"q_weight must have shape \(12,\)", {"q_weight": zeros(D + 1)}),
    (ValueError, r"k_weight must have shape \(12,\)", {"k_weight": zeros(1, D)}),
    (ValueError, "k_weight must be on q's device", {"k_weight": zeros(D, device="meta")}),
    (TypeError, "q_weight may be float64 only where q is", {"q_weight": zeros(D, dtype=torch.float64)}),
    (ValueError, "weight_offset needs weights.*q_weight=None", {"q_weight": None, "weight_offset": 1.0}),
    (ValueError, "weight_offset needs weights.*k_weight=None", {"k_weight": None, "weight_offset": 1.0}),
    (ValueError, "eps must be finite and >= 0", {"eps": -1e-6}),
    (TypeError, "eps must be a float", {"eps": "1e-6"}),
    (TypeError, "round_before_weight must be a bool; got str", {"round_before_weight": "yes"}),
]


@pytest.mark.parametrize(("error", "message", "arguments"), BAD + BAD_NORMS, ids=range(len(BAD + BAD_NORMS)))
def test_bad_input_of_norms_is_refused(error: type[Exception], message: str, arguments: dict[str, Any]) -> None:
    good = {"q": zeros(B, H, T, D), "k": zeros(B, HK, T, D), "q_weight": zeros(D), "k_weight": zeros(D), **both()}
    with pytest.raises(error, match=message):
        qk_norm_rope(**{**good, **arguments})


def test_tables_that_require_a_gradient_serve_where_none_is_taken() -> None:
    with torch.no_grad():
        rope(zeros(B, H, T, D), zeros(B, HK, T, D), **{name: t.requires_grad_() for name, t in both().items()})
