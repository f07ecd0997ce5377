"""SwiGLU and GEGLU: the references against torch's activations, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.ops.swiglu import geglu, swiglu
from foundry_kernels.testing import lay_out


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
def test_gradcheck(function: Activation) -> None:
    gate, up = (3 * normal(3, 4)).requires_grad_(), normal(3, 4).flip(0).requires_grad_()
    assert torch.autograd.gradcheck(function, (gate, up))
    assert torch.autograd.gradcheck(function, (3 * normal(3, 6)).requires_grad_())
    assert torch.autograd.gradgradcheck(function, (gate, up))


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


@functions
@pytest.mark.parametrize("layout", ["contiguous", "swapped", "sliced", "offset", "expanded", "strided"])
def test_output_is_contiguous_and_inputs_are_untouched(function: Activation, layout: str) -> None:
    gate, up = lay_out(normal(2, 3, 5, 6), layout), lay_out(normal(2, 3, 5, 6).flip(0), layout)
    before = gate.clone(), up.clone()
    expected = function(gate.contiguous(), up.contiguous())
    for out in (function(gate, up), function(gate)):
        assert out.is_contiguous()
        out.fill_(7.0)
    torch.testing.assert_close(function(gate, up), expected)
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


@functions
def test_compiles_with_dynamic_shapes(function: Activation) -> None:
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (3, 5, 8):
        gate, up = normal(rows, 6).requires_grad_(), normal(rows, 6).flip(0).requires_grad_()
        for inputs in ((gate, up), (gate,)):
            actual, expected = compiled(*inputs), function(*inputs)
            assert torch.equal(actual, expected)
            for a, e in zip(*(torch.autograd.grad(o.sum(), inputs) for o in (actual, expected)), strict=True):
                assert torch.equal(a, e)


@functions
def test_autocast_changes_nothing(function: Activation) -> None:
    gate, up = normal(3, 4, dtype=torch.float32), normal(3, 4, dtype=torch.float32).flip(0)
    with torch.autocast("cpu", torch.bfloat16):
        out = function(gate, up)
    assert torch.equal(out, function(gate, up))


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


BAD: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (TypeError, "gate must be a torch.Tensor; got float", {"gate": 1.0}),
    (TypeError, "gate must be float32.*int64", {"gate": zeros(2, 4, dtype=torch.int64)}),
    (TypeError, "gate must be float32.*complex64", {"gate": zeros(2, 4, dtype=torch.complex64)}),
    (ValueError, "at least one dimension", {"gate": zeros(), "up": zeros()}),
    (ValueError, "gate must be .*2N.*up is None; got shape .2, 5.", {"gate": zeros(2, 5), "up": None}),
    (TypeError, "up must be a torch.Tensor; got str", {"up": "up"}),
    (TypeError, "up must be float32.*bool", {"up": zeros(2, 4, dtype=torch.bool)}),
    (ValueError, "up must have shape .2, 4. .*got .2, 5.", {"up": zeros(2, 5)}),
    (ValueError, "up must have shape .2, 4. .*got .4,.", {"up": zeros(4)}),
    (ValueError, "up must have gate's dtype", {"up": zeros(2, 4, dtype=torch.bfloat16)}),
    (ValueError, "up must be on gate's device", {"up": zeros(2, 4, device="meta")}),
    (ValueError, "backend must be one of auto, reference, triton, native; got 'eager'", {"backend": "eager"}),
]


@pytest.mark.parametrize("function", [swiglu, geglu])
@pytest.mark.parametrize(("error", "message", "arguments"), BAD, ids=range(len(BAD)))
def test_bad_input_is_refused(
    function: Activation, error: type[Exception], message: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        function(**{"gate": zeros(2, 4), "up": zeros(2, 4), **arguments})


def test_unknown_approximation_is_refused() -> None:
    with pytest.raises(ValueError, match="approximate must be one of none, tanh; got 'sigmoid'"):
        geglu(zeros(2, 4), approximate="sigmoid")
