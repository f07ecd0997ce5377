"""log_probs and linear_log_probs: what the parity suite does not ask."""

from __future__ import annotations

import math
from typing import Any

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


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tensor_of_the_logits_size_is_saved(backend: str) -> None:
    if backend == "reference":
        pytest.skip("the reference stores the logits")
    hidden, weight, target = inputs(n=64, n_classes=512)
    sizes: list[int] = []

    def pack(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        fk.linear_log_probs(
            hidden.requires_grad_(), weight.requires_grad_(), target, return_entropy=True, backend=backend
        )
    assert max(sizes) == weight.numel()


@pytest.mark.parametrize("backend", BACKENDS)
def test_bits_do_not_depend_on_the_batch(backend: str) -> None:
    hidden, weight, target = inputs(n=40, width=64, n_classes=131)
    whole = fk.linear_log_probs(hidden, weight, target, return_entropy=True, batch_invariant=True, backend=backend)
    with fk.batch_invariant():
        for i in (0, 17, 39):
            one = fk.linear_log_probs(
                hidden[i : i + 1], weight, target[i : i + 1], return_entropy=True, backend=backend
            )
            assert all(torch.equal(a[0], b[i]) for a, b in zip(one, whole, strict=True))


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


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"target": torch.zeros(5, dtype=torch.int64)}, ValueError, "target must have shape"),
        ({"target": torch.zeros(6)}, TypeError, "target must be"),
        ({"target": torch.full((6,), 11)}, IndexError, "target must be in 0 .. 10 or ignore_index -100; got 11"),
        ({"logit_scale": 0.0}, ValueError, "logit_scale must not be 0"),
        ({"logit_scale": math.inf}, ValueError, "logit_scale must be"),
        ({"softcap": 0.0}, ValueError, "softcap must be"),
        ({"return_entropy": 1}, TypeError, "return_entropy must be"),
        ({"backend": "cuda"}, ValueError, "backend must be one of"),
    ],
)
def test_bad_input(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    hidden, weight, target = inputs()
    given = {"target": target} | changes
    with pytest.raises(error, match=message):
        fk.log_probs(hidden @ weight.t(), **given)
    with pytest.raises(error, match=message):
        fk.linear_log_probs(hidden, weight, **given)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"weight": torch.zeros(11, 7)}, ValueError, "weight must have shape"),
        ({"bias": torch.zeros(7)}, ValueError, "bias must have shape"),
        ({"chunk_size": 0}, ValueError, "chunk_size"),
        ({"chunk_size": "tiles", "batch_invariant": True}, ValueError, "chunk_size must be a number of tokens or None"),
    ],
)
def test_bad_input_of_the_linear_layer(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    hidden, weight, target = inputs()
    with pytest.raises(error, match=message):
        fk.linear_log_probs(**({"hidden": hidden, "weight": weight, "target": target} | changes))
