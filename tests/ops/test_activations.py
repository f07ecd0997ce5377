"""What the parity cases of glu, reglu, bias_gelu, bias_silu and bias_relu do not cover: torch's own answers, also where
they are infinite or NaN, and derivatives where they are small."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import foundry_kernels as fk

#: Two arguments, and what eager PyTorch makes of them.
EAGER: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "glu": lambda gate, up: gate.sigmoid() * up,
    "reglu": lambda gate, up: gate.relu() * up,
    "bias_silu": lambda x, bias: F.silu(x + bias),
    "bias_relu": lambda x, bias: (x + bias).relu(),
}
BACKENDS = [pytest.param(name, b, id=f"{name}-{b}") for name in EAGER for b in fk.OPS[name].backends("cpu")]
SPECIAL = (-math.inf, -1e30, -50.0, -1.0, -0.0, 0.0, 2.0, 50.0, 1e30, math.inf, math.nan)


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_special_values_are_those_of_eager_pytorch(name: str, backend: str) -> None:
    """Forward and backward, each value with each other and each gradient: what is infinite, saturated or NaN, and the
    slope of relu at 0."""
    values = torch.tensor(SPECIAL)
    first, second, dy = torch.cartesian_prod(values, values, torch.tensor([1.0, 0.0, math.inf, math.nan])).T
    biased = name.startswith("bias")
    a, dy = first[None].contiguous().requires_grad_(), dy[None].contiguous()
    b = (second if biased else second[None]).contiguous().requires_grad_()
    found, expected = getattr(fk, name)(a, b, backend=backend), EAGER[name](a, b)
    torch.testing.assert_close(found, expected, equal_nan=True)
    for grad, theirs in zip(*(torch.autograd.grad(y, (a, b), dy) for y in (found, expected)), strict=True):
        if name == "bias_silu":  # torch's own is NaN or 0 at infinity, as the terms are ordered
            seen = (a + b).detach().abs().reshape(theirs.shape) < 1e30
            grad, theirs = grad[seen], theirs[seen]
        torch.testing.assert_close(grad, theirs, equal_nan=True)


@pytest.mark.parametrize("backend", fk.OPS["glu"].backends("cpu"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_derivative_of_the_logistic_function_is_exact_where_it_is_small(backend: str, dtype: torch.dtype) -> None:
    gate = torch.linspace(-9.0, 9.0, 257).to(dtype).requires_grad_()
    up = torch.ones_like(gate)
    (found,) = torch.autograd.grad(fk.glu(gate, up, backend=backend), gate, up)
    s = gate.detach().double().sigmoid()
    torch.testing.assert_close(found.double(), s * (1.0 - s), rtol=1e-3 + 2 * torch.finfo(dtype).eps, atol=1e-7)


def test_the_references_are_torchs_own_rounded_once() -> None:
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        a, b = (torch.randn(7, 34, generator=g).to(dtype) for _ in range(2))
        for name, eager in EAGER.items():
            second = b[0] if name.startswith("bias") else b
            expected = eager(a.float(), second.float()).to(dtype)
            assert torch.equal(getattr(fk, name)(a, second, backend="reference"), expected)
        assert torch.equal(fk.glu(a, backend="reference"), EAGER["glu"](*a.float().chunk(2, -1)).to(dtype))
    packed = torch.randn(3, 10)
    torch.testing.assert_close(fk.glu(packed), F.glu(packed.roll(5, -1)), rtol=1e-6, atol=1e-6)  # whose gate is last


forms = pytest.mark.parametrize("approximate", ["none", "tanh"])


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bias_gelu_is_torchs_rounded_once(approximate: str, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    a, bias = torch.randn(7, 33, generator=g).to(dtype), torch.randn(33, generator=g).to(dtype)
    expected = F.gelu(a.float() + bias.float(), approximate=approximate).to(dtype)
    assert torch.equal(fk.bias_gelu(a, bias, approximate=approximate, backend="reference"), expected)
    assert torch.equal(
        fk.bias_gelu(a, approximate=approximate, backend="reference"),
        F.gelu(a.float(), approximate=approximate).to(dtype),
    )


@forms
@pytest.mark.parametrize("backend", fk.OPS["bias_gelu"].backends("cpu"))
def test_far_out_bias_gelu_is_zero_or_the_identity(backend: str, approximate: str) -> None:
    """The sum decides, not its terms; NaN stays in its element."""
    a = torch.tensor([[-300.0, 300.0, -1e4, 1e4, math.nan, 3.0]], requires_grad=True)
    bias = torch.tensor([200.0, -200.0, 0.0, 0.0, 0.0, -3.0])
    y = fk.bias_gelu(a, bias, approximate=approximate, backend=backend)
    (dx,) = torch.autograd.grad(y, a, torch.ones_like(y))
    torch.testing.assert_close(y, torch.tensor([[0.0, 100.0, 0.0, 1e4, math.nan, 0.0]]), equal_nan=True)
    torch.testing.assert_close(dx, torch.tensor([[0.0, 1.0, 0.0, 1.0, math.nan, 0.5]]), equal_nan=True)
