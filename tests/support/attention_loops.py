"""Shared code of the tests of foundry_kernels.compat: attention in plain matrices, and options to test."""

from __future__ import annotations

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


def plain(
    q: Tensor, k: Tensor, v: Tensor, qv: Tensor | None = None, *, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, attention_chunk: int = 0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One sequence, q [T, H, D], k [S, Hk, D], v [S, Hk, Dv], qv [T, H, Dv]: out [T, H, Dv], lse [H, T], float64."""
    repeats = q.shape[1] // k.shape[1]
    q, k, v = q.double(), *(x.double().repeat_interleave(repeats, 1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k)
    width = q.shape[2]
    if qv is not None:
        scores, width = scores + torch.einsum("thd,shd->hts", qv.double(), v), width + v.shape[2]
    scores = scores * (width**-0.5 if softmax_scale is None else softmax_scale)
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    i, j = torch.arange(len(q))[:, None] + len(k) - len(q), torch.arange(len(k))
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[:, None, None] * (j - i).abs()
    seen = (j <= i) | torch.tensor(not causal)
    if window_size[0] >= 0:
        seen = seen & (j >= i - window_size[0])
    if window_size[1] >= 0:
        seen = seen & (j <= i + window_size[1])
    if attention_chunk:
        seen = seen & (j // attention_chunk == i.div(attention_chunk, rounding_mode="floor"))
    none = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~(seen | none), -torch.inf)
    weights = scores.softmax(-1) if len(k) else scores
    out = torch.einsum("hts,shd->thd", weights.masked_fill(none, 0.0), v)
    return out, (scores.logsumexp(-1) if len(k) else scores.sum(-1)).masked_fill(none[..., 0], -torch.inf)


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


def of_sequence(options: dict[str, Any], n: int) -> dict[str, Any]:
    """The options for one sequence of a batch."""
    slopes = options.get("alibi_slopes")
    return options if slopes is None or slopes.dim() == 1 else options | {"alibi_slopes": slopes[n]}
