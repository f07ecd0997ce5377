"""Shared code of the tests of foundry_kernels.compat: attention in plain loops, and options to test."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk

BACKENDS = ("reference", *(("native",) if "native" in fk.OPS["flash_attention"].backends("cpu") else ()))
#: In float64, references must agree with the loops up to rounding; kernels run in float32.
EXACT = {"reference": (torch.float64, 1e-12), "native": (torch.float32, 2e-5)}
over_backends = pytest.mark.parametrize("backend", BACKENDS)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence, q [T, H, D], k [S, Hk, D], v [S, Hk, Dv], query by query: (out [T, H, Dv], lse [H, T])."""
    (t, h, d), (s, hk, _) = q.shape, k.shape
    q, k, v = q.double(), k.double(), v.double()
    out, lse = torch.zeros(t, h, v.shape[2], dtype=torch.float64), torch.full((h, t), -math.inf, dtype=torch.float64)
    left, right = window
    for head in range(h):
        for i in range(t):
            q_pos = i + s - t
            first = 0 if left < 0 else max(0, q_pos - left)
            last = s - 1 if right < 0 else min(s - 1, q_pos + right)
            last = min(last, q_pos) if causal else last
            if first > last:
                continue
            scores = k[first : last + 1, head // (h // hk)] @ q[i, head] * (d**-0.5 if scale is None else scale)
            scores = softcap * (scores / softcap).tanh() if softcap else scores
            if slopes is not None:
                scores = scores - slopes[head].double() * (torch.arange(first, last + 1) - q_pos).abs()
            lse[head, i] = scores.logsumexp(0)
            out[i, head] = scores.softmax(0) @ v[first : last + 1, head // (h // hk)]
    return out, lse


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "window": {"window_size": (3, 1)},
    "left-window-causal": {"window_size": (4, -1), "causal": True},
    "window-0": {"window_size": (0, 0)},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625]), "causal": True},
    "alibi-per-sequence": {"alibi_slopes": torch.tensor([[0.5, 0.25, 0.1, 0.0], [0.3, 0.2, 0.1, 0.05], [0.1] * 4])},
}
over_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def for_loop(options: dict[str, Any], sequence: int) -> dict[str, Any]:
    names = {"softmax_scale": "scale", "window_size": "window", "alibi_slopes": "slopes"}
    found = {names.get(name, name): value for name, value in options.items()}
    if "slopes" in found and found["slopes"].dim() == 2:
        found["slopes"] = found["slopes"][sequence]
    return found
