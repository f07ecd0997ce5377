"""The options of swiglu (GPT-OSS's gate): the reference against plain PyTorch, and what the parity cases do not cover
of the kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from built import needs_native
from table import rows
from torch import Tensor

from foundry_kernels.ops.swiglu import SWIGLU, swiglu

KERNELS = [pytest.param(r.backend, r.device, id=r.id) for r in rows() if r.op.name == "swiglu"]
kernels = pytest.mark.parametrize(("backend", "device"), KERNELS)
OSS: dict[str, Any] = {"alpha": 1.702, "limit": 7.0, "up_offset": 1.0}
HARD = (-math.inf, -1e18, -7.5, -7.0, -1.0, -0.0, 0.0, 1.0, 7.0, 7.5, 1e18, math.inf, math.nan)
DTYPES = (torch.float32, torch.bfloat16)


class Clamp(torch.autograd.Function):
    """`torch.clamp`, with the gradient that it has before PyTorch 2.14: that of a bound passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float | None, high: float) -> Tensor:
        ctx.inside = (x >= (-math.inf if low is None else low)) & (x <= high)
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return dy.masked_fill(~ctx.inside, 0.0), None, None


def gpt_oss(gate_up: Tensor, clamp: Any = torch.clamp) -> Tensor:
    """Computes it as transformers' `GptOssExperts._apply_gate` does."""
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = clamp(gate, None, 7.0)
    up = clamp(up, -7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def step(function: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    y = function(*inputs)
    return y, *torch.autograd.grad(y, inputs, torch.ones_like(y))


def pairs(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Every hard value of the gate beside every one of up, interleaved."""
    hard = torch.tensor(HARD, dtype=dtype, device=device)
    return torch.stack([hard.repeat_interleave(len(HARD)), hard.repeat(len(HARD))], -1).flatten()


def test_equals_gpt_oss() -> None:
    """Output and gradient agree at the limits, beyond them, at infinity and with NaN. At the limits `torch.clamp` has
    one gradient or another, by its version."""
    x = pairs(torch.float64)
    y, dx = step(lambda x: swiglu(x, **OSS, interleaved=True), (x,))
    for (expected_y, expected_dx), compared in (
        (step(lambda x: gpt_oss(x, Clamp.apply), (x,)), torch.ones_like(x, dtype=torch.bool)),
        (step(gpt_oss, (x,)), x.abs() != 7.0),
    ):
        torch.testing.assert_close(y, expected_y, rtol=1e-14, atol=0, equal_nan=True)
        torch.testing.assert_close(dx[compared], expected_dx[compared], rtol=1e-14, atol=0, equal_nan=True)


@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [OSS, {"alpha": 1.702}, {"limit": 7.0}, {}], ids=lambda o: "-".join(o) or "plain")
def test_extremes_are_those_of_the_reference(
    backend: str, device: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    x = pairs(dtype, device)
    if "limit" not in options:  # autograd sums infinities of both signs where up is infinite, and has NaN
        x = x.view(-1, 2)[~x[1::2].isinf()].flatten()

    def run(backend: str) -> tuple[Tensor, ...]:
        separate = step(lambda g, u: swiglu(g, u, **options, backend=backend), (x[::2], x[1::2]))
        return *separate, *step(lambda x: swiglu(x, **options, interleaved=True, backend=backend), (x,))

    ulp = torch.finfo(dtype).eps
    for actual, expected in zip(run(backend), run("reference"), strict=True):
        torch.testing.assert_close(actual, expected, rtol=8 * ulp, atol=max(ulp, 1e-6), equal_nan=True)


@needs_native
def test_calls_with_options_are_direct_too() -> None:
    x = torch.ones(2, 4)
    assert SWIGLU.direct("auto", x, None, 1.0, None, 0.0, False) is not None
    assert SWIGLU.direct("auto", x, None, 1.702, 7.0, 1.0, True) is not None
    for bad in ((math.nan, None, 0.0, False), (1.0, 0.0, 0.0, False), (1.0, 1e300, 0.0, False), (1.0, None, 0.0, 1)):
        assert SWIGLU.direct("auto", x, None, *bad) is None
    assert SWIGLU.direct("auto", x, x, 1.0, None, 0.0, True) is None


X = torch.zeros(2, 4)
