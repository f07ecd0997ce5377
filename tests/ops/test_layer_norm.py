"""What the parity cases of LayerNorm do not cover: errors, torch's own answers, how exact it is far from 0."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import foundry_kernels as fk

x, w = torch.ones(2, 3, 8), torch.ones(8)

BAD: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no tensor": (lambda: fk.layer_norm([1.0]), TypeError, r"x must be a torch.Tensor; got list"),  # type: ignore[arg-type]
    "scalar": (lambda: fk.layer_norm(torch.tensor(1.0)), ValueError, r"x must have at least one dimension"),
    "zero width": (lambda: fk.layer_norm(torch.ones(2, 0)), ValueError, r"x must have a last dimension of at least 1"),
    "weight": (lambda: fk.layer_norm(x, torch.ones(7)), ValueError, r"weight must have shape \(8,\).*got \(7,\)"),
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
