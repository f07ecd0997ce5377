"""log_probs and linear_log_probs: what the parity suite does not ask."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.ops._linear_loss import operators

BACKENDS = [b for b in ("reference", "triton", "native") if fk.OPS["log_probs"].why_not(b, "cpu") is None]


def inputs(n: int = 6, width: int = 8, n_classes: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(n, width, generator=g), torch.randn(n_classes, width, generator=g)
    return hidden, weight, torch.randint(n_classes, (n,), generator=g)


@pytest.mark.parametrize("backend", BACKENDS)
def test_known_distributions(backend: str) -> None:
    logits, target = torch.zeros(3, 7), torch.tensor([0, 3, 6])
    logits[1, 3], logits[2, 0] = 50.0, math.inf
    picked, entropy, lse = fk.log_probs(logits, target, return_entropy=True, return_lse=True, backend=backend)
    assert picked[0] == pytest.approx(-math.log(7))
    assert entropy[0] == pytest.approx(math.log(7))
    assert picked[1] == pytest.approx(-6 * math.exp(-50), rel=1e-5)
    assert entropy[1] == pytest.approx(6 * 51 * math.exp(-50), rel=1e-5)
    assert lse[2] == math.inf
    assert fk.log_probs(torch.full((1, 2), -math.inf).index_fill(1, torch.tensor([0]), 0.0), torch.tensor([0])) == 0.0


def test_the_temperature_of_logits_and_of_hidden_states() -> None:
    hidden, weight, target = inputs()
    logits = hidden @ weight.t()
    expected = torch.log_softmax(logits / 0.7, -1).gather(-1, target[:, None]).squeeze(-1)
    torch.testing.assert_close(fk.log_probs(logits, target, logit_scale=1 / 0.7), expected)
    torch.testing.assert_close(fk.linear_log_probs(hidden, weight, target, logit_scale=1 / 0.7), expected)


def test_the_lse_of_a_loss_has_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """And costs nothing where nobody asks for it."""
    hidden, weight, target = (x.requires_grad_() if x.is_floating_point() else x for x in inputs())
    calls: list[str] = []
    for name, own in operators.BACKENDS.items():
        if name.endswith("linear_log_probs"):
            backward = lambda *args, own=own.backward: calls.append("lse") or own(*args)  # noqa: E731
            monkeypatch.setitem(operators.BACKENDS, name, own._replace(backward=backward))
    for reduction in ("mean", "none"):
        loss, lse = fk.linear_cross_entropy(hidden, weight, target, reduction=reduction, return_lse=True)
        loss.sum().backward()
        assert not calls
        loss, lse = fk.linear_cross_entropy(hidden, weight, target, reduction=reduction, return_lse=True)
        found = torch.autograd.grad(loss.sum() + 0.3 * lse.square().sum(), (hidden, weight))
        logits = hidden @ weight.t()
        each = torch.nn.functional.cross_entropy(logits, target, reduction=reduction).sum()
        expected = torch.autograd.grad(each + 0.3 * logits.logsumexp(-1).square().sum(), (hidden, weight))
        torch.testing.assert_close(found, expected)
        calls.clear()
