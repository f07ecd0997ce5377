"""What the parity cases of norms do not cover: torch's own answers, several trailing dimensions, extremes of dtypes,
and how exact a LayerNorm is far from 0."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from built import needs_native
from table import rows

import foundry_kernels as fk
from foundry_kernels.core import extension

OPS = ("rms_norm", "add_rms_norm")
KERNELS = [pytest.param(r.backend, r.device, id=r.id) for r in rows() if r.op.name == "rms_norm"]

x, w = torch.ones(2, 3, 8), torch.ones(8)


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_several_trailing_dimensions(backend: str, device: str) -> None:
    """The mean over all of them, by the weight's shape or by name; as torch's, and with a residual."""
    torch.manual_seed(0)
    a = torch.randn(5, 3, 4, device=device).transpose(0, 1).requires_grad_()
    weight = torch.randn(5, 4, device=device, requires_grad=True)
    dy = torch.randn(3, 5, 4, device=device)
    expected = F.rms_norm(a, (5, 4), weight, 1e-3)
    for y in (
        fk.rms_norm(a, weight, 1e-3, backend=backend),
        fk.rms_norm(a, weight, 1e-3, normalized_shape=(5, 4), backend=backend),
        fk.add_rms_norm(a, torch.zeros_like(a), weight, 1e-3, backend=backend)[0],
        fk.add_rms_norm(a, a, weight, 4e-3, backend=backend, normalized_shape=torch.Size((5, 4)))[0],
        fk.rms_norm(a, weight - 1.0, 1e-3, weight_offset=1.0, backend=backend),
    ):
        torch.testing.assert_close(y, expected)
        grads = (torch.autograd.grad(out, (a, weight), dy, retain_graph=True) for out in (y, expected))
        for actual, right in zip(*grads, strict=True):
            torch.testing.assert_close(actual, right)
    whole = fk.rms_norm(a, eps=1e-3, normalized_shape=(3, 5, 4), backend=backend)
    torch.testing.assert_close(whole, F.rms_norm(a, (3, 5, 4), None, 1e-3))
    assert torch.equal(
        fk.rms_norm(a, normalized_shape=4, backend=backend),  # type: ignore[arg-type]
        fk.rms_norm(a, backend=backend),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_no_eps_is_torchs_default(op: str, dtype: torch.dtype) -> None:
    """Rows so small that it decides."""
    a = torch.linspace(1e-4, 3e-4, 16).view(2, 8).to(dtype)
    weight = torch.ones(8, dtype=dtype)
    y = fk.rms_norm(a, weight, None) if op == "rms_norm" else fk.add_rms_norm(a, a * 0, weight, None)[0]
    torch.testing.assert_close(y, F.rms_norm(a, (8,), weight))
    assert torch.equal(y, fk.rms_norm(a, weight) if op == "rms_norm" else fk.add_rms_norm(a, a * 0, weight)[0])
    assert not torch.allclose(y, fk.rms_norm(a, weight, 1e-6))


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_an_offset_without_a_weight_has_no_effect(backend: str, device: str) -> None:
    a = torch.randn(3, 8, device=device)
    y = fk.rms_norm(a, weight_offset=1.0, backend=backend)
    assert torch.equal(y, fk.rms_norm(a, backend=backend))
    pair = fk.add_rms_norm(a, torch.zeros_like(a), weight_offset=1.0, backend=backend)
    assert torch.equal(pair[0], y)
    assert torch.equal(pair[1], a)


@needs_native
def test_the_bare_operator_checks_too() -> None:
    """torch.ops.foundry_kernels.rms_norm is reachable without the public function."""
    with pytest.raises(ValueError, match="weight must have shape"):
        torch.ops.foundry_kernels.rms_norm(x, torch.ones(7), 1e-6, 0.0, False)
    with pytest.raises(ValueError, match="last dimension"):
        torch.ops.foundry_kernels.rms_norm(x[..., :0], None, 1e-6, 0.0, False)
    with pytest.raises(TypeError, match="unsupported dtype"):
        torch.ops.foundry_kernels.rms_norm(x.double(), None, 1e-6, 0.0, False)


def test_the_reference_is_torch_rms_norm() -> None:
    a, weight = torch.randn(7, 33), torch.randn(33)
    torch.testing.assert_close(fk.rms_norm(a, weight, 1e-5, backend="reference"), F.rms_norm(a, (33,), weight, 1e-5))


def test_the_reference_is_the_llama_form() -> None:
    a, weight = torch.randn(7, 33).bfloat16(), torch.randn(33)
    rounded = (a.float() * torch.rsqrt(a.float().pow(2).mean(-1, keepdim=True) + 1e-5)).bfloat16()
    for cast in (weight, weight.bfloat16()):
        expected = cast * rounded
        actual = fk.rms_norm(a, cast, 1e-5, round_before_weight=True, backend="reference")
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_extremes_of_the_dtype(backend: str, device: str, dtype: torch.dtype) -> None:
    """Largest and subnormal values round as torch rounds them."""
    info = torch.finfo(dtype)
    a = torch.tensor([[info.max, info.max, -info.max], [info.tiny, info.tiny / 4, 0.0]], device=device).to(dtype)
    weight = torch.tensor([1.0, info.tiny, 0.5], device=device)
    for eps in (1.0, 1e-6):
        expected = fk.rms_norm(a, weight, eps, backend="reference")
        assert torch.equal(fk.rms_norm(a, weight, eps, backend=backend), expected)


@needs_native
@pytest.mark.parametrize("name", extension.build_info().get("usable_instruction_sets", []))
def test_every_half_precision_number_survives(instruction_set: Callable[[str], None], name: str) -> None:
    """Reading and rounding of all 2^16 bit patterns, against torch's: x + 0 is h."""
    instruction_set(name)
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(64, 1024)
    for dtype in (torch.bfloat16, torch.float16):
        a = bits.view(dtype)
        for scale in (1.0, 1.001, 3.0):  # values between those that the dtype has, too
            b = (a.float() * scale).to(dtype)
            _, h = fk.add_rms_norm(a, b, backend="native")
            expected = a + b
            assert torch.equal(h.isnan(), expected.isnan())
            assert torch.equal(h.nan_to_num(), expected.nan_to_num())


@needs_native
@pytest.mark.parametrize("name", extension.build_info().get("usable_instruction_sets", []))
def test_any_nan_in_a_wide_weight_stays_nan(instruction_set: Callable[[str], None], name: str) -> None:
    """All its mantissa's bits set: rounding to bfloat16 must not carry into the exponent and the sign."""
    instruction_set(name)
    weight = torch.full((67,), 0x7FFFFFFF, dtype=torch.int32)
    weight[::3] = -1
    for dtype in (torch.bfloat16, torch.float16):
        a = torch.linspace(-2.0, 2.0, 67).to(dtype).expand(2, 67)
        y = fk.rms_norm(a, weight.view(torch.float32), round_before_weight=False, backend="native")
        assert y.dtype == dtype
        assert y.isnan().all()


@needs_native
def test_unknown_instruction_sets_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown instruction set"):
        extension._C.force_instruction_set("avx1024")


# --- LayerNorm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_reference_is_torch_layer_norm(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    a, weight, bias = (torch.randn(*shape, generator=g).to(dtype) for shape in ((7, 33), (33,), (33,)))
    for pair in ((weight, bias), (weight, None), (None, None)):
        expected = F.layer_norm(a, (33,), *pair, 1e-3)
        torch.testing.assert_close(fk.layer_norm(a, *pair, 1e-3, backend="reference"), expected)
    y, h = fk.add_layer_norm(a, 2 * a, weight, bias, backend="reference")
    assert torch.equal(h, a + 2 * a)
    torch.testing.assert_close(y, F.layer_norm(a + 2 * a, (33,), weight, bias))


@pytest.mark.parametrize("shape", [(8,), (3, 8)], ids=str)
def test_the_signature_of_torch(shape: tuple[int, ...]) -> None:
    a, weight, bias = torch.randn(2, 3, 8), torch.randn(shape), torch.randn(shape)
    for given in ((), (weight,), (weight, bias), (None, bias, 0.1)):
        torch.testing.assert_close(fk.compat.layer_norm(a, shape, *given), F.layer_norm(a, shape, *given))
    with pytest.raises(ValueError, match=r"input must end in normalized_shape \(7,\)"):
        fk.compat.layer_norm(a, [7])
    with pytest.raises(ValueError, match=r"weight must have shape .*normalized_shape"):
        fk.compat.layer_norm(a, shape, weight[None])


@pytest.mark.parametrize("backend", fk.OPS["layer_norm"].backends("cpu"))
def test_rows_far_from_zero(backend: str) -> None:
    """Mean 1e4, standard deviation 1: in float32 a difference of squares would have no correct digit. Kernels have the
    mean correct to half a unit in its last place (5e-4), plain PyTorch to two or three."""
    a = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) + 1e4
    y = fk.layer_norm(a, backend=backend)
    error = (y - F.layer_norm(a.double(), (1000,))).abs().max()
    assert error < (3e-3 if backend == "reference" else 6e-4)


@pytest.mark.parametrize("backend", fk.OPS["layer_norm"].backends("cpu"))
def test_rows_of_one_value_are_the_bias(backend: str) -> None:
    bias = torch.linspace(-1.0, 1.0, 100)
    a = torch.tensor([[3.7], [-1e6], [0.0], [1e-30]]).expand(4, 100)
    y = fk.layer_norm(a, torch.full((100,), 1e-3), bias, backend=backend)
    torch.testing.assert_close(y, bias.expand(4, 100), rtol=0.0, atol=2e-2)


def test_a_residual_of_another_dtype_is_added_in_the_wider_one() -> None:
    a, residual = torch.randn(3, 8).bfloat16(), torch.randn(3, 8)
    y, h = fk.add_layer_norm(a, residual, w, w)
    assert torch.equal(h, (a + residual).bfloat16())
    assert torch.equal(y, fk.layer_norm(h, w, w))
