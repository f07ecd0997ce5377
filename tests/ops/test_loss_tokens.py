"""What the losses give of each token beside its loss, and scaling by it: against formulas of plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from table import rows
from torch import Tensor

import foundry_kernels as fk

LOSSES = [r for r in rows("reference", "triton", "native") if r.op.name.endswith("cross_entropy")]
losses = pytest.mark.parametrize(
    ("op", "backend", "device"), [pytest.param(r.op.name, r.backend, r.device, id=r.id) for r in LOSSES]
)
ALL: dict[str, Any] = {"return_token_accuracy": True, "return_predicted_tokens": True}
TOKENS, CLASSES = 23, 11


def draw(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight, and targets of which some are right and some ignored."""
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(TOKENS, 8, generator=g), torch.randn(CLASSES, 8, generator=g)
    target = torch.where(torch.rand(TOKENS, generator=g) < 0.5, (hidden @ weight.t()).argmax(1), torch.arange(23) % 11)
    target[[0, 7]] = -100
    return hidden.to(device).requires_grad_(), weight.to(device).requires_grad_(), target.to(device)


def call(op: str, hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Any:
    if op == "cross_entropy":
        options.pop("chunk_size", None)
        return fk.cross_entropy(hidden @ weight.t(), target, **options)
    return fk.linear_cross_entropy(hidden, weight, target, **options)


@losses
@pytest.mark.parametrize("chunk_size", [5, "tiles"])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_each_token(op: str, backend: str, device: str, reduction: str, chunk_size: Any) -> None:
    """The scaled loss with its gradients, accuracy and predictions."""
    if op == "cross_entropy" and chunk_size == "tiles":
        pytest.skip("makes no logits")
    hidden, weight, target = draw(device)
    options: dict[str, Any] = {"reduction": reduction, "token_scaling": True, "label_smoothing": 0.1} | ALL
    loss, right, predicted = call(op, hidden, weight, target, chunk_size=chunk_size, backend=backend, **options)

    logits, counts = hidden @ weight.t(), target != -100
    p = logits.detach().softmax(1).gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    exact = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1) * p
    correct = (logits.argmax(1) == target).float()
    if reduction != "none":
        exact, correct = exact.sum(), correct.sum() / counts.sum()
    if reduction == "mean":
        exact = exact / counts.sum()
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(right, correct)
    assert torch.equal(predicted, torch.where(counts, logits.argmax(1), -1))
    assert not right.requires_grad
    dloss = torch.linspace(0.5, 1.5, loss.numel(), device=device).view(loss.shape)
    found = (torch.autograd.grad(each, (hidden, weight), dloss) for each in (loss, exact))
    for a, e in zip(*found, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@losses
@pytest.mark.parametrize("chunk_size", [5, "tiles"])
def test_of_equal_logits_the_first(op: str, backend: str, device: str, chunk_size: Any) -> None:
    """Whichever of them the target is, and with tiles whose classes are in several splits."""
    target = torch.tensor([0, 40, 69, 80, 5], device=device)
    weight = torch.zeros(81, 4, device=device)
    weight[40], weight[69] = 1.0, 1.0
    hidden = torch.ones(5, 4, device=device)
    options = {"backend": backend, "chunk_size": chunk_size, "reduction": "none"} | ALL
    _, right, predicted = call(op, hidden, weight, target, **options)
    assert predicted.tolist() == [40] * 5
    assert right.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0]
    _, right, predicted = call(op, hidden * 0.0, weight, target, **options)
    assert predicted.tolist() == [0] * 5
    assert right.tolist() == [1.0, 0.0, 0.0, 0.0, 0.0]


@losses
def test_where_nothing_counts(op: str, backend: str, device: str) -> None:
    hidden, weight, target = draw(device)
    options = ALL | {"token_scaling": True, "backend": backend, "ignore_index": -1}
    for chunk_size in (5, "tiles"):
        loss, right, predicted = call(op, hidden, weight, target.fill_(-1), chunk_size=chunk_size, **options)
        assert (loss, right) == (0.0, 0.0)
        assert predicted.tolist() == [-1] * TOKENS
        assert not torch.autograd.grad(loss, weight)[0].any()


@losses
def test_a_token_that_the_model_is_certain_of_is_not_scaled(op: str, backend: str, device: str) -> None:
    """And one that it rules out counts nothing, without NaN."""
    hidden = torch.tensor([[200.0, -200.0]], device=device, requires_grad=True)
    weight = torch.eye(2, device=device)
    for target, loss_of_token in ((0, 0.0), (1, 0.0)):
        given = torch.tensor([target], device=device)
        loss = call(op, hidden, weight, given, token_scaling=True, backend=backend)
        assert loss == loss_of_token
        assert torch.autograd.grad(loss, hidden)[0].isfinite().all()
