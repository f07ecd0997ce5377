"""The modules of norms: what they compute, what they refuse."""

from __future__ import annotations

import pytest
import torch

from foundry_kernels import nn

# --- RMSNorm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-3])
@pytest.mark.parametrize("shape", [7, (7,), (3, 7)], ids=str)
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_rms_norm_is_torchs(dtype, eps, shape, affine):
    theirs = torch.nn.RMSNorm(shape, eps, affine, dtype=dtype)
    ours = nn.RMSNorm(shape, eps, affine, dtype=dtype)
    assert isinstance(ours, torch.nn.RMSNorm)
    assert ours.normalized_shape == theirs.normalized_shape
    if affine:
        torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 3, 7, dtype=torch.float64).mul(1e-3).to(dtype)  # small, so that a wrong eps shows
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("shape", [8, (2, 8)], ids=str)
def test_rms_norm_of_a_residual_sum(shape):
    norm = nn.RMSNorm(shape, 1e-5)
    torch.nn.init.normal_(norm.weight)
    x, residual = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    y, h = norm(x, residual)
    torch.testing.assert_close(h, x + residual)
    torch.testing.assert_close(y, norm(x + residual))


def test_rms_norm_offset_starts_at_one_and_is_added():
    norm = nn.RMSNorm(8, 1e-6, weight_offset=1.0)
    assert torch.equal(norm.weight, torch.zeros(8))
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), nn.RMSNorm(8, 1e-6)(x))
    with torch.no_grad():
        norm.weight.fill_(0.5)
    torch.testing.assert_close(norm(x), 1.5 * nn.RMSNorm(8, 1e-6)(x))
    norm.reset_parameters()
    assert torch.equal(norm.weight, torch.zeros(8))


def test_rms_norm_llama_order_promotes():
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert nn.RMSNorm(8, round_before_weight=True)(x).dtype == torch.float32
    assert nn.RMSNorm(8)(x).dtype == torch.bfloat16


# --- LayerNorm --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [7, (3, 7)], ids=str)
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"elementwise_affine": False}], ids=str)
def test_layer_norm_is_torchs(dtype, shape, options):
    theirs = torch.nn.LayerNorm(shape, 1e-3, **options, dtype=dtype)
    ours = nn.LayerNorm(shape, 1e-3, **options, dtype=dtype)
    assert isinstance(ours, torch.nn.LayerNorm)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(4, 3, 7, dtype=torch.float64).add(2.0).mul(1e-2).to(dtype)  # small, so that a wrong eps shows
    torch.testing.assert_close(ours(x), theirs(x))
    y, h = ours(x, x)
    torch.testing.assert_close(h, x + x)
    torch.testing.assert_close(y, theirs(x + x))
