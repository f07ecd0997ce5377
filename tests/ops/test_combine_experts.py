"""combine_experts beyond parity: slots without a row, and the gather whose gradient it is."""

from __future__ import annotations

import pytest
import torch
from table import Row, checked_rows
from torch import Tensor

import foundry_kernels as fk

BACKENDS = fk.OPS["combine_experts"].backends("cpu", torch.float32)
#: Kernels for GPUs, on the CPU.
GPU_ROWS = [
    pytest.param(r, id=r.id)
    for r in checked_rows()
    if r.op.name == "combine_experts" and r.device == "cpu" and (r.backend == "triton" or r.cuda_on_cpu)
]
SLOTS = torch.tensor([[2, 0], [-1, 4], [1, -1]])


def draw() -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(5, 6, generator=g).requires_grad_(), torch.randn(3, 2, generator=g).requires_grad_()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_row_adds_nothing(backend: str) -> None:
    """Whatever its weight is, and whatever is in the rows that no slot names."""
    x, weights = draw()
    with torch.no_grad():
        x[3] = x[0] = torch.nan
        weights[1, 0] = weights[2, 1] = torch.nan
    y = fk.combine_experts(x, weights, SLOTS, backend=backend)
    dx, dweights = torch.autograd.grad(y.sum(), (x, weights))
    assert y.isnan().all(1).tolist() == [True, False, False]
    torch.testing.assert_close(y[1], weights[1, 1] * x[4])
    assert torch.equal(dx[3], torch.zeros(6))
    assert dweights[1, 0] == dweights[2, 1] == 0
    assert dx.isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_is_the_gradient_of_a_gather(backend: str) -> None:
    tokens = torch.randn(3, 8, requires_grad=True)
    token_of_row = torch.tensor([2, 0, 1, 0, 2, 1])
    slots = torch.argsort(token_of_row, stable=True).view(3, 2)
    dy = torch.randn(6, 8)
    (expected,) = torch.autograd.grad(tokens[token_of_row], tokens, dy)
    torch.testing.assert_close(fk.combine_experts(dy, None, slots, backend=backend), expected)


@pytest.mark.parametrize("row", GPU_ROWS)
def test_on_a_gpu_a_slot_outside_x_makes_its_token_nan(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foundry_kernels.ops.combine_experts.is_subclass", lambda x: True)
    x, weights = draw()
    y = fk.combine_experts(x, weights, torch.tensor([[2, 0], [5, 4], [1, -7]]), backend=row.backend)
    dx, dweights = torch.autograd.grad(y, (x, weights), torch.ones_like(y))
    assert y.isnan().all(1).tolist() == [False, True, False]
    assert dweights.isnan().tolist() == [[False, False], [True, False], [False, False]]
    assert dx.isfinite().all()


@pytest.mark.skipif("native" not in BACKENDS, reason="the extension is not built")
def test_a_row_in_two_slots_has_no_gradient_of_its_own() -> None:
    x, weights = draw()
    y = fk.combine_experts(x, weights, torch.tensor([[2, 0], [2, 4], [1, -1]]), backend="native")
    with pytest.raises(ValueError, match="slots must name a row of x once at most; row 2 is in several"):
        y.sum().backward()
