"""SwiGLU and GEGLU: the references against torch's activations, what the parity cases do not cover of the kernels, and
what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import rows, saved_tensors
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.ops.swiglu import geglu, swiglu
from foundry_kernels.testing import lay_out

OPS = ("swiglu", "geglu")
KERNELS = [pytest.param(r.backend, r.device, id=r.id) for r in rows() if r.op.name == "swiglu"]
kernels = pytest.mark.parametrize(("backend", "device"), KERNELS)
needs_native = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))
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
def test_autocast_changes_nothing(function: Activation) -> None:
    gate, up = normal(3, 4, dtype=torch.float32), normal(3, 4, dtype=torch.float32).flip(0)
    with torch.autocast("cpu", torch.bfloat16):
        out = function(gate, up)
    assert torch.equal(out, function(gate, up))


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


@kernels
@pytest.mark.parametrize("packed", [False, True], ids=["separate", "packed"])
def test_nothing_is_computed_for_what_needs_no_gradient(backend: str, device: str, packed: bool) -> None:
    """The backward operator returns empty tensors for gradients that are not wanted."""
    backward = getattr(torch.ops.foundry_kernels, "triton_glu_bwd" if backend == "triton" else "glu_bwd")
    dy = torch.randn(4, 8, device=device)
    if packed:
        dgate, dup = backward(dy[:, :4], dy, None, "silu", True, False)
        assert dgate.shape == (4, 8)
        assert dup.numel() == 0
        return
    for need_dgate, need_dup in ((True, False), (False, True), (False, False)):
        dgate, dup = backward(dy, dy, dy, "gelu", need_dgate, need_dup)
        assert (dgate.numel(), dup.numel()) == (32 * need_dgate, 32 * need_dup)


@kernels
def test_only_the_inputs_are_kept(backend: str, device: str) -> None:
    gate, up, packed = (torch.randn(16, n, device=device, requires_grad=True) for n in (32, 32, 64))
    with saved_tensors() as saved:
        swiglu(gate, up, backend=backend)
        geglu(packed, backend=backend)
    assert {t.data_ptr() for t in saved} == {t.data_ptr() for t in (gate, up, packed)}
    assert sum(t.numel() for t in saved) == 2 * 16 * 64


@kernels
def test_a_packed_gradient_is_that_of_its_halves(backend: str, device: str) -> None:
    """Bitwise equal, in one contiguous tensor."""
    packed = torch.randn(5, 3, 34, device=device).bfloat16().requires_grad_()
    gate, up = (half.detach().clone().requires_grad_() for half in packed.chunk(2, -1))
    dy = torch.randn(5, 3, 17, device=device).bfloat16()
    (dpacked,) = torch.autograd.grad(swiglu(packed, backend=backend), packed, dy)
    dgate, dup = torch.autograd.grad(swiglu(gate, up, backend=backend), (gate, up), dy)
    assert dpacked.is_contiguous()
    assert torch.equal(dpacked, torch.cat([dgate, dup], -1))


@kernels
def test_offsets_beyond_32_bits(backend: str, device: str) -> None:
    """Rows 2^31 elements apart. The memory is reserved and, but for the rows, never touched."""
    stride = 2**31
    far = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device).as_strided((3, 64), (stride, 1))
    near = torch.randn(3, 64, device=device).bfloat16()
    far.copy_(near)
    results = []
    for a in (near, far):
        gate, up = a.detach().requires_grad_(), a.detach().requires_grad_()
        y = swiglu(gate, up, backend=backend)
        results.append((y, *torch.autograd.grad(y, (gate, up), a.detach())))
    assert all(map(torch.equal, *results))


@needs_native
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(1, 70002), (37, 4096), (3001, 66)], ids=str)
def test_the_number_of_threads_does_not_change_a_bit(shape: tuple[int, int]) -> None:
    results = []
    for n in (1, 2, 5):
        torch.set_num_threads(n)
        packed = normal(*shape, dtype=torch.float32).requires_grad_()
        y = swiglu(packed, backend="native")
        results.append((y, *torch.autograd.grad(y, packed, y.detach())))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@needs_native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_instruction_set(instruction_set: Callable[[str], None], name: str, dtype: torch.dtype) -> None:
    """The extremes; test_instruction_sets.py runs the parity cases."""
    instruction_set(name)
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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_outputs_larger_than_the_caches(instruction_set: Callable[[str], None], name: str, dtype: torch.dtype) -> None:
    """Above 16 MB outputs are streamed: bitwise equal to small calls, whose outputs are not."""
    instruction_set(name)
    n_rows, width = (17 << 20) // (2048 * dtype.itemsize), 2048
    packed = normal(n_rows, 2 * width, dtype=dtype)
    gate, up = (half.contiguous() for half in packed.chunk(2, -1))

    def step(*inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = tuple(t.detach().requires_grad_() for t in inputs)
        y = swiglu(*inputs, backend="native")
        return y, *torch.autograd.grad(y, inputs, y.detach())

    for inputs in ((gate, up), (packed,)):
        pieces = [step(*part) for part in zip(*(t.split(700) for t in inputs), strict=True)]
        for whole, *parts in zip(step(*inputs), *pieces, strict=True):
            assert whole.nbytes > 16 << 20
            assert torch.equal(whole, torch.cat(parts))


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


# --- what is refused -------------------------------------------------------------------------------------------------


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
