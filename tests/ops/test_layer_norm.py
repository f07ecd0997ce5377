"""What the parity cases of LayerNorm do not cover: errors, torch's own answers, how exact it is far from 0, threads,
instruction sets, what is computed and saved."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from table import cpu_setting, rows, saved_tensors

import foundry_kernels as fk
from foundry_kernels.core import extension

KERNELS = [pytest.param(r.backend, r.device, id=r.id) for r in rows() if r.op.name == "layer_norm"]
INSTRUCTION_SETS = extension.build_info().get("usable_instruction_sets", [])
needs_native = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))

x, w = torch.ones(2, 3, 8), torch.ones(8)

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no tensor": (lambda: fk.layer_norm([1.0]), TypeError, r"x must be a torch.Tensor; got list"),  # type: ignore[arg-type]
    "scalar": (lambda: fk.layer_norm(torch.tensor(1.0)), ValueError, r"x must have at least one dimension"),
    "zero width": (lambda: fk.layer_norm(torch.ones(2, 0)), ValueError, r"x must have a last dimension of at least 1"),
    "weight": (lambda: fk.layer_norm(x, torch.ones(7)), ValueError, r"weight must have shape \(8,\).*got \(7,\)"),
    "weight as in F.layer_norm": (
        lambda: fk.layer_norm(x, (8,), w, w),  # type: ignore[arg-type]
        TypeError,
        r"weight must be a torch.Tensor; got tuple",
    ),
    "bias number": (lambda: fk.layer_norm(x, w, 1e-5), TypeError, r"bias must be a torch.Tensor; got float"),  # type: ignore[arg-type]
    "bias shape": (lambda: fk.layer_norm(x, w, torch.ones(1, 8)), ValueError, r"bias must have shape \(8,\)"),
    "bias integers": (lambda: fk.layer_norm(x, None, w.int()), TypeError, r"bias must be float.*got torch.int32"),
    "bias double": (lambda: fk.layer_norm(x, w, w.double()), TypeError, r"bias may be float64 only where x is"),
    "bias device": (lambda: fk.layer_norm(x, w, w.to("meta")), ValueError, r"bias must be on x's device cpu; got meta"),
    "eps negative": (lambda: fk.layer_norm(x, w, w, -1e-6), ValueError, r"eps must be finite and >= 0; got -1e-06"),
    "eps nan": (lambda: fk.layer_norm(x, w, w, math.nan), ValueError, r"eps must be finite"),
    "residual shape": (lambda: fk.add_layer_norm(x, x[:1], w), ValueError, r"residual must have shape \(2, 3, 8\)"),
    "residual integers": (lambda: fk.add_layer_norm(x, x.int(), w), TypeError, r"residual must be float"),
    "residual device": (lambda: fk.add_layer_norm(x, x.to("meta"), w), ValueError, r"residual must be on x's device"),
    "backend": (lambda: fk.layer_norm(x, backend="fast"), ValueError, r"backend must be one of auto, .*'fast'"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what: str) -> None:
    function, error, message = BAD[what]
    with pytest.raises(error, match=message):
        function()


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


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_nothing_is_computed_for_what_needs_no_gradient(backend: str, device: str) -> None:
    backward = getattr(torch.ops.foundry_kernels, "triton_layer_norm_bwd" if backend == "triton" else "layer_norm_bwd")
    dy, vector, stats = torch.randn(4, 8, device=device), torch.ones(8, device=device), torch.ones(4, device=device)
    for wanted in ((True, False, False), (False, True, False), (False, False, True), (False, False, False)):
        gradients = backward(dy, dy, dy, vector, vector, stats, stats, *wanted)
        assert [t.numel() for t in gradients] == [n * needed for n, needed in zip((32, 8, 8), wanted, strict=True)]


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_the_input_and_two_numbers_a_row_are_kept(backend: str, device: str) -> None:
    a = torch.randn(16, 64, device=device, requires_grad=True)
    weight, bias = torch.ones(2, 64, device=device, requires_grad=True)
    with saved_tensors() as saved:
        _, h = fk.add_layer_norm(a, a, weight, bias, backend=backend)
    assert sum(t.numel() for t in saved) == 16 * 64 + 2 * 64 + 2 * 16
    assert any(t.data_ptr() == h.data_ptr() for t in saved)


@pytest.mark.parametrize(("backend", "device"), KERNELS)
def test_non_finite_rows_stay_in_their_row(backend: str, device: str) -> None:
    a = torch.randn(4, 40, device=device)
    clean = fk.layer_norm(a, backend=backend)
    a[1, 3], a[2, 5] = math.nan, math.inf
    y = fk.layer_norm(a, backend=backend)
    assert y[1:3].isnan().all()
    assert torch.equal(y[[0, 3]], clean[[0, 3]])


def step(a: torch.Tensor, affine: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a, weight, bias = a.detach().requires_grad_(), *(v.detach().requires_grad_() for v in affine)
    y, h = fk.add_layer_norm(a, a, weight, bias, backend="native")
    return y, h, *torch.autograd.grad((y, h), (a, weight, bias), (y.detach(), h.detach()))


@needs_native
@pytest.mark.parametrize("shape", [(1, 70001), (37, 4096), (3001, 65)], ids=str)
def test_the_number_of_threads_does_not_change_a_bit(shape: tuple[int, int]) -> None:
    a, affine = torch.randn(shape), torch.randn(2, shape[1])
    results = []
    for threads in (1, 2, 5):
        with cpu_setting(INSTRUCTION_SETS[-1], threads):
            results.append(step(a, affine))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_larger_than_the_caches(dtype: torch.dtype) -> None:
    """Above 16 MB outputs are streamed: bitwise equal to small calls, whose outputs are not."""
    a, affine = torch.randn((17 << 20) // (2048 * dtype.itemsize), 2048).to(dtype), torch.randn(2, 2048).to(dtype)
    parts = [step(part, affine)[:3] for part in a.split(700)]
    for whole, *pieces in zip(step(a, affine)[:3], *parts, strict=True):
        assert whole.nbytes > 16 << 20
        assert torch.equal(whole, torch.cat(pieces))
