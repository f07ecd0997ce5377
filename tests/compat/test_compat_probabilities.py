"""Cross-entropy of class probabilities: what torch's samples, in `test_compat_samples.py`, leave out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import saved_tensors
from torch import Tensor

from foundry_kernels.compat import cross_entropy, probabilities

SHAPES = [(7,), (5, 7), (3, 7, 4), (0, 7), (2, 7, 0)]


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, probabilities and weights of 7 classes, which all require a gradient."""
    g = torch.Generator().manual_seed(0)
    x, t = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    t = t.softmax(min(t.dim() - 1, 1))
    weight = torch.linspace(0.0, 2.0, 7)
    return tuple(each.to(dtype).requires_grad_() for each in (x, t, weight))  # type: ignore[return-value]


def both(leaves: tuple[Tensor, ...], weighted: bool = True, **options: Any) -> list[list[Tensor]]:
    """Loss and gradients by us and by PyTorch."""
    found = []
    for function in (cross_entropy, F.cross_entropy):
        used = leaves if weighted else leaves[:2]
        kept = {key: value for key, value in options.items() if key != "backend" or function is cross_entropy}
        loss = function(*used, **kept)
        cotangent = torch.linspace(0.5, 1.5, loss.numel(), dtype=loss.dtype).view(loss.shape)
        found.append([loss, *torch.autograd.grad(loss, used, cotangent)])
    return found


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_options(shape: tuple[int, ...], reduction: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With parts of one or two elements of the batch. A mean over nothing is 0."""
    monkeypatch.setattr(probabilities, "_PART_CPU", 14)
    leaves = draw(shape)
    for options in ({}, {"label_smoothing": 0.2}, {"weighted": False, "label_smoothing": 1.0}):
        ours, theirs = both(leaves, reduction=reduction, backend=backend, **options)
        if reduction == "mean" and leaves[0].numel() == 0:
            assert ours[0] == 0
            assert not any(g.any() for g in ours[1:])
            continue
        for a, e in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, e)


def test_one_class_for_certain_is_that_class() -> None:
    """Also of logits far from 0, and of low precision, where the loss is rounded once."""
    x = draw((5, 7))[0].detach() * 100.0
    target = torch.arange(5)
    t = F.one_hot(target, 7).float()
    torch.testing.assert_close(cross_entropy(x, t), cross_entropy(x, target))
    low = cross_entropy(x.bfloat16(), t.bfloat16())
    assert torch.equal(low, F.cross_entropy(x.bfloat16().double(), t.double()).bfloat16())
    assert cross_entropy(x.bfloat16(), t).dtype == torch.float32 == F.cross_entropy(x.bfloat16(), t).dtype


def test_only_the_inputs_are_kept() -> None:
    x, t, weight = draw((5, 7))
    with saved_tensors() as saved:
        cross_entropy(x, t, weight, backend="auto")
    whole = [s for s in saved if s.numel() >= x.numel()]
    assert {s.data_ptr() for s in whole} <= {x.data_ptr(), t.data_ptr()}


def test_second_derivatives_are_the_references() -> None:
    x, t, weight = draw((2, 7), torch.float64)
    assert torch.autograd.gradgradcheck(lambda *a: cross_entropy(*a, backend="reference"), (x, t, weight))
    assert torch.autograd.gradcheck(probabilities._InParts.apply, (x, t, weight, 0.1))
    with pytest.raises(RuntimeError, match="cross_entropy has no second derivative"):
        torch.autograd.grad(probabilities._InParts.apply(x, t, weight, 0.1).sum(), x, create_graph=True)
    hessian = torch.func.hessian(lambda a: cross_entropy(a, t.detach()))(x.detach())
    torch.testing.assert_close(hessian, torch.func.hessian(lambda a: F.cross_entropy(a, t.detach()))(x.detach()))
