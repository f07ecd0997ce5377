"""SwiGLU and GEGLU: the references against torch's activations, and what the parity cases do not cover of the
kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built import needs_native
from table import rows
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.ops.swiglu import geglu, swiglu

KERNELS = [pytest.param(r.backend, r.device, id=r.id) for r in rows() if r.op.name == "swiglu"]
kernels = pytest.mark.parametrize(("backend", "device"), KERNELS)
INSTRUCTION_SETS = extension.build_info().get("usable_instruction_sets", [])
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def swiglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return swiglu(gate, up, backend="reference")


def geglu_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return geglu(gate, up, backend="reference")


def geglu_tanh_reference(gate: Tensor, up: Tensor | None = None) -> Tensor:
    return geglu(gate, up, approximate="tanh", backend="reference")


def tanh_form(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


Activation = Callable[..., Tensor]
FORMS: list[tuple[Activation, Activation]] = [
    (swiglu_reference, lambda x: x * torch.sigmoid(x)),
    (geglu_reference, lambda x: x * 0.5 * torch.erfc(-x / 2**0.5)),
    (geglu_tanh_reference, tanh_form),
]
forms = pytest.mark.parametrize(("function", "activation"), FORMS, ids=["swiglu", "geglu", "geglu-tanh"])
functions = pytest.mark.parametrize("function", [f for f, _ in FORMS], ids=["swiglu", "geglu", "geglu-tanh"])


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@forms
@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (0, 4), (3, 0)], ids=str)
def test_equals_the_formula(function: Activation, activation: Activation, shape: tuple[int, ...]) -> None:
    gate, up = 4 * normal(*shape), normal(*shape).flip(-1)
    expected = activation(gate) * up
    torch.testing.assert_close(function(gate, up), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(function(torch.cat([gate, up], -1)), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_once(dtype: torch.dtype) -> None:
    gate, up = normal(33, 17, dtype=dtype), normal(33, 17, dtype=dtype).flip(0)
    g, u = gate.float(), up.float()
    assert torch.equal(swiglu_reference(gate, up), (F.silu(g) * u).to(dtype))
    assert torch.equal(geglu_reference(gate, up), (F.gelu(g) * u).to(dtype))
    assert torch.equal(geglu_tanh_reference(gate, up), (F.gelu(g, approximate="tanh") * u).to(dtype))


@functions
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saturated_gates_are_zero_or_the_identity(function: Activation, dtype: torch.dtype) -> None:
    gate = torch.tensor([-1e4, -200.0, 200.0, 1e4], dtype=dtype, requires_grad=True)
    up = torch.tensor([3.0, 3.0, 3.0, 3.0], dtype=dtype, requires_grad=True)
    out = function(gate, up)
    expected = torch.tensor([0.0, 0.0, 600.0, 3e4], dtype=dtype)
    assert torch.equal(out, (gate.detach().clamp(min=0) * 3).to(dtype))
    torch.testing.assert_close(out, expected, rtol=1e-2, atol=0)
    out.sum().backward()
    assert torch.equal(gate.grad, torch.tensor([0.0, 0.0, 3.0, 3.0], dtype=dtype))
    assert torch.equal(up.grad, gate.detach().clamp(min=0))


# --- the kernels -----------------------------------------------------------------------------------------------------

OPTIONS: list[tuple[str, dict[str, Any]]] = [("swiglu", {}), ("geglu", {}), ("geglu", {"approximate": "tanh"})]
activations = pytest.mark.parametrize(("op", "options"), OPTIONS, ids=["swiglu", "geglu", "geglu-tanh"])


def every_exponent(dtype: torch.dtype) -> Tensor:
    """Both signs of every exponent with a few mantissas: zeros, subnormals, infinities and NaN among them."""
    if dtype == torch.float32:
        bits = torch.arange(512, dtype=torch.int64)[:, None] << 23 | torch.tensor([0, 1, 0x2AAAAA, 0x7FFFFF])
        around = torch.cat([torch.arange(s, s + 8, 0.125) for s in (-104.0, -92.0, 84.0, 100.0)])
        return torch.cat([bits.flatten().to(torch.int32).view(torch.float32), around])
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@activations
@kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_extremes_are_those_of_the_reference(
    op: str, options: dict[str, Any], backend: str, device: str, dtype: torch.dtype
) -> None:
    """NaN and infinity where the reference has them, in the output and both gradients; else equal to rounding."""
    values = every_exponent(dtype).to(device)
    if op == "geglu" and not options:  # torch's gelu doubles before it halves: infinite too early, and NaN at infinity
        values = values[~(values.float().abs() > torch.finfo(torch.float32).max / 2)]
        infinite = torch.full((64,), math.inf, dtype=dtype, device=device)
        assert torch.equal(geglu(infinite, torch.ones_like(infinite), backend=backend), infinite)
    results = []
    for each in ("reference", backend):
        gate, up = values.clone().requires_grad_(), torch.ones_like(values).requires_grad_()
        y = fk.OPS[op].public(gate, up, **options, backend=each)
        results.append((y, *torch.autograd.grad(y, (gate, up), torch.ones_like(y))))
    ulp = torch.finfo(dtype).eps
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=2 * ulp, atol=max(ulp, 1e-6), equal_nan=True)


@needs_native
@pytest.mark.parametrize("name", INSTRUCTION_SETS[:-1])
def test_extremes_with_fewer_instructions(instruction_set: Callable[[str], None], name: str) -> None:
    instruction_set(name)
    for dtype in DTYPES:
        for op, options in OPTIONS:
            test_extremes_are_those_of_the_reference(op, options, "native", "cpu", dtype)


@needs_native
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_the_exponential_keeps_its_relative_error(instruction_set: Callable[[str], None], name: str) -> None:
    """The value of silu(g) for g far below 0 is g e^g: within 2 units in the last place and 8e-8 |g| of it, down to
    -87."""
    instruction_set(name)
    g = -torch.linspace(18.0, 87.0, 200_001)
    exact = (g.double() * torch.sigmoid(g.double())).float()
    error = ((swiglu(g, torch.ones_like(g), backend="native") - exact) / exact).abs()
    assert (error <= 4 * 6e-8 + 8e-8 * g.abs()).all()


@needs_native
def test_the_bare_operators_check_too() -> None:
    """torch.ops.foundry_kernels.* are reachable without the public functions."""
    a, ops = torch.ones(2, 4), torch.ops.foundry_kernels
    with pytest.raises(ValueError, match="up must have gate's shape"):
        ops.swiglu(a, a[:1])
    with pytest.raises(TypeError, match="up must have gate's dtype"):
        ops.swiglu(a, a.bfloat16())
    with pytest.raises(ValueError, match="2N"):
        ops.swiglu(torch.ones(2, 3), None)
    with pytest.raises(TypeError, match="unsupported dtype"):
        ops.swiglu(a.double(), a.double())
    with pytest.raises(ValueError, match="approximate must be one of none, tanh; got sigmoid"):
        ops.geglu(a, a, "sigmoid")
    with pytest.raises(ValueError, match=r"activation must be one of silu, .*; got tanh"):
        ops.glu_fwd(a, a, "tanh")
    assert ops.swiglu(torch.empty(2, 8, device="meta"), None).shape == (2, 4)
