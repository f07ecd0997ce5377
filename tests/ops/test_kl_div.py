"""kl_div and linear_kl_div: what the parity suite does not ask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import foundry_kernels as fk

BACKENDS = [b for b in ("reference", "triton", "native") if fk.OPS["kl_div"].why_not(b, "cpu") is None]
DIRECTIONS = ("forward", "reverse", "jsd", "tvd")


def inputs(n: int = 6, width: int = 8, teacher_width: int = 12, n_classes: int = 11) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"hidden": (n, width), "weight": (n_classes, width)}
    shapes |= {"teacher_hidden": (n, teacher_width), "teacher_weight": (n_classes, teacher_width)}
    return {name: torch.randn(shape, generator=g) for name, shape in shapes.items()}


def generalized_jsd(logits: Tensor, teacher: Tensor, beta: float, temperature: float) -> Tensor:
    """The sum over the tokens of what TRL's `GKDTrainer.generalized_jsd_loss` computes, by its operations."""
    log_q, log_p = (torch.log_softmax(x / temperature, -1) for x in (logits, teacher))
    if beta in (0.0, 1.0):
        pair = (log_q, log_p) if beta == 0.0 else (log_p, log_q)
        return F.kl_div(*pair, reduction="sum", log_target=True)
    b = torch.tensor(beta, dtype=logits.dtype)
    log_m = torch.logsumexp(torch.stack([log_q + torch.log1p(-b), log_p + torch.log(b)]), 0)
    of_teacher, of_student = (F.kl_div(log_m, x, reduction="sum", log_target=True) for x in (log_p, log_q))
    return b * of_teacher + (1 - b) * of_student


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_beta_is_that_of_gkd(backend: str, beta: float) -> None:
    """Its ends are the two KL divergences."""
    given = inputs()
    hidden, weight = given["hidden"].requires_grad_(), given["weight"].requires_grad_()
    logits = hidden @ weight.t()
    teacher = given["teacher_hidden"] @ given["teacher_weight"].t()
    expected = generalized_jsd(logits, teacher, beta, 1.7)
    gradients = torch.autograd.grad(expected, (hidden, weight), retain_graph=True)
    options: dict[str, Any] = {"temperature": 1.7, "direction": "jsd", "beta": beta, "reduction": "sum"}
    for found in (
        fk.linear_kl_div(**given, **options, backend=backend),
        fk.kl_div(logits, teacher, **options, backend=backend),
    ):
        torch.testing.assert_close(found, expected)
        own = torch.autograd.grad(found, (hidden, weight), retain_graph=True)
        torch.testing.assert_close(own, gradients)
    if beta in (0.0, 1.0):
        named = fk.kl_div(
            logits, teacher, temperature=1.7, direction="reverse" if beta else "forward", reduction="sum",
            backend=backend,
        )  # fmt: skip
        assert torch.equal(named, found)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_known_divergences(backend: str, direction: str) -> None:
    """Of certain distributions that agree or not, of one that is uniform, and of classes that are ruled out."""
    logits = torch.tensor([[50.0, 0, 0, 0], [0, 0, 0, 0], [100, 0, 0, 0], [0, 0, 0, -math.inf], [-math.inf, 0, 0, 0]])
    teacher = torch.tensor(
        [[50.0, 0, 0, 0], [200, 0, 0, 0], [0, 100, 0, 0], [0, 0, 0, -math.inf], [-math.inf, 1, 1, 1]]
    )
    logits.requires_grad_()
    found = fk.kl_div(logits, teacher, direction=direction, reduction="none", backend=backend)
    certain_against_uniform = {"forward": math.log(4), "reverse": 150 - math.log(4)}.get(
        direction,
        0.75
        if direction == "tvd"
        else 0.5 * math.log(1 / 0.625) + 0.5 * (0.25 * math.log(0.25 / 0.625) + 0.75 * math.log(2)),
    )
    expected = [0.0, certain_against_uniform, {"jsd": math.log(2), "tvd": 1.0}.get(direction, 100.0), 0.0, 0.0]
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-6, rtol=1e-5)
    found.sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    torch.testing.assert_close(logits.grad.sum(-1), torch.zeros(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_class_that_only_one_rules_out(backend: str) -> None:
    """KL divergences are infinite if what is weighted has a probability where the other has none."""
    a, b = torch.tensor([[0.0, 0.0, -math.inf]]), torch.zeros(1, 3)
    assert fk.kl_div(a, b, backend=backend) == math.inf
    assert fk.kl_div(b, a, backend=backend) == pytest.approx(math.log(1.5))
    assert fk.kl_div(b, a, direction="reverse", backend=backend) == math.inf
    assert fk.kl_div(a, b, direction="reverse", backend=backend) == pytest.approx(math.log(1.5))
    mixed = [fk.kl_div(*pair, direction="jsd", backend=backend) for pair in ((a, b), (b, a))]
    expected = 0.5 * math.log(0.5 / (5 / 12)) + 0.5 * (2 / 3 * math.log(0.8) + 1 / 3 * math.log(2))
    assert mixed == pytest.approx([expected, expected])


@pytest.mark.parametrize(
    ("direction", "beta"), [*((d, 0.5) for d in DIRECTIONS if d != "tvd"), *(("jsd", b) for b in (0.7, 0.3, 0.1, 0.01))]
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_small_divergences(backend: str, direction: str, beta: float) -> None:
    """They are at least 0, with the gradient that they have without this bound, and accurate: a log-probability of -6
    is rounded by up to 2.4e-7, and the sum is far more exact than its terms. Shares of a mixture sum to 1."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(12, 300, generator=g).requires_grad_()
    teacher = logits.detach() + torch.logspace(-4.5, -3.0, 12)[:, None] * torch.randn(12, 300, generator=g)
    options: dict[str, Any] = {"direction": direction, "beta": beta, "reduction": "none"}
    exact = fk.kl_div(logits.double(), teacher.double(), **options, backend="reference")
    found = fk.kl_div(logits, teacher, **options, backend=backend)
    assert 1e-12 < exact.min() < exact.max() < 1e-6
    assert found.min() >= 0.0
    assert (found - exact).abs().max() < 2e-8
    gradients = (torch.autograd.grad(each.sum(), logits)[0] for each in (found, exact))
    torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_target_but_the_ignored_one_is_read(backend: str) -> None:
    given, options = inputs(), {"reduction": "none", "backend": backend}
    found = fk.linear_kl_div(**given, target=torch.tensor([3, -100, 99, -7, -100, 0]), **options)
    counts = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    torch.testing.assert_close(found, fk.linear_kl_div(**given, **options) * counts)


@pytest.mark.parametrize("backend", BACKENDS)
def test_teachers_logits_dtypes_and_gradients(backend: str) -> None:
    """The teacher is a constant, in a dtype of its own, by its hidden states or by its logits."""
    given = inputs(n=40)
    leaves = {n: x.requires_grad_() for n, x in given.items()}
    found = fk.linear_kl_div(**leaves, direction="jsd", chunk_size=7, backend=backend)
    expected = torch.autograd.grad(found, (given["hidden"], given["weight"]))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(fk.linear_kl_div(**leaves, direction="jsd", backend=backend), leaves["teacher_hidden"])
    logits = given["teacher_hidden"] @ given["teacher_weight"].t()
    student = {n: given[n] for n in ("hidden", "weight")}
    by_logits = fk.linear_kl_div(**student, teacher_logits=logits, direction="jsd", chunk_size=7, backend=backend)
    torch.testing.assert_close(by_logits, found)
    torch.testing.assert_close(torch.autograd.grad(by_logits, (given["hidden"], given["weight"])), expected)
    for dtype in (torch.bfloat16, torch.float16):
        low = {n: x.detach().to(dtype) for n, x in given.items() if "teacher" in n}
        exact = fk.linear_kl_div(**student, **{n: x.float() for n, x in low.items()}, direction="jsd", backend=backend)
        torch.testing.assert_close(
            fk.linear_kl_div(**student, **low, direction="jsd", backend=backend), exact, rtol=2e-2, atol=0
        )
        both = fk.kl_div(logits.to(dtype), logits, backend=backend)
        torch.testing.assert_close(both, fk.kl_div(logits.to(dtype).float(), logits, backend="reference"))


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_listed_classes(backend: str, direction: str) -> None:
    """All of them have the whole divergence, some have no more. Their order, repetitions and what fills up a row change
    nothing."""
    given, options = inputs(), {"direction": direction, "reduction": "none", "backend": backend}
    leaves = tuple(given[n].requires_grad_() for n in ("hidden", "weight"))
    log_p, ids = (given["teacher_hidden"] @ given["teacher_weight"].t()).log_softmax(-1).sort(-1, descending=True)

    def of(log_p: Tensor, ids: Tensor, **more: Any) -> tuple[Tensor, ...]:
        found = fk.linear_kl_div(*leaves, teacher_ids=ids, teacher_log_probs=log_p, **options, **more)
        return found.detach(), *torch.autograd.grad(found.sum(), leaves)

    whole = fk.linear_kl_div(**given, **options)
    expected = whole.detach(), *torch.autograd.grad(whole.sum(), leaves)
    torch.testing.assert_close(of(log_p, ids), expected)
    torch.testing.assert_close(of(log_p, ids, add_tail=False), expected)
    some = of(log_p[:, :4], ids[:, :4])
    assert (some[0] <= expected[0] + 1e-6).all()
    assert some[0].sum() < expected[0].sum() - 1e-3
    order = [2, 0, 3, 0, 1, 3]
    filled = F.pad(log_p[:, order], (0, 2), value=-math.inf), F.pad(ids[:, order], (0, 2), value=-1)
    torch.testing.assert_close(of(*filled), some)
    torch.testing.assert_close(of(*filled, add_tail=False), of(log_p[:, :4], ids[:, :4], add_tail=False))
    nothing = of(torch.full_like(log_p, -math.inf), ids)
    assert not any(x.any() for x in nothing)
