"""What the parity cases of LayerNorm do not cover: errors, torch's own answers, how exact it is far from 0, threads,
instruction sets, what is computed and saved."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from table import rows

import foundry_kernels as fk
from foundry_kernels.core import extension

KERNELS = [pytest.param(r.backend, r.device, id=r.id) for r in rows() if r.op.name == "layer_norm"]
INSTRUCTION_SETS = extension.build_info().get("usable_instruction_sets", [])
needs_native = pytest.mark.skipif(extension.MISSING is not None, reason=str(extension.MISSING))

x, w = torch.ones(2, 3, 8), torch.ones(8)


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
