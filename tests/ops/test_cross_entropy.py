"""Cross-entropy: the reference against torch's own, and what the table of cases cannot say of the kernels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from built import needs_native
from table import Row, checked_rows, rows
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.ops.cross_entropy import cross_entropy

ROWS = [r for r in rows("reference", "triton", "native") if r.op.name == "cross_entropy"]
BACKENDS = [pytest.param(r.backend, r.device, id=r.id) for r in ROWS]
backends = pytest.mark.parametrize(("backend", "device"), BACKENDS)
kernels = pytest.mark.parametrize(("backend", "device"), [p for p in BACKENDS if p.values[0] != "reference"])
#: With the CUDA kernels on a CPU among them.
checked = pytest.mark.parametrize(
    "row", [pytest.param(r, id=r.id) for r in checked_rows() if r.op.name == "cross_entropy"]
)
REDUCTIONS = ("none", "mean", "sum")


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def step(x: Tensor, target: Tensor, dloss: Tensor | None = None, **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient."""
    x = x.detach().requires_grad_()
    loss = cross_entropy(x, target, **options)
    assert isinstance(loss, Tensor)
    (grad,) = torch.autograd.grad(loss, x, torch.ones_like(loss) if dloss is None else dloss)
    return loss.detach(), grad


# --- torch's own ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reference_equals_torch(reduction: str, weighted: bool, label_smoothing: float) -> None:
    x, target = 3 * normal(9, 13), integers(13, 9)
    target[[2, 5]] = -100
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": label_smoothing}
    options["weight"] = normal(13).abs() if weighted else None
    expected = x.clone().requires_grad_()
    loss = F.cross_entropy(expected, target, **options)
    (grad,) = torch.autograd.grad(loss, expected, torch.ones_like(loss))
    for a, e in zip(step(x, target, backend="reference", **options), (loss, grad), strict=True):
        torch.testing.assert_close(a, e, rtol=1e-12, atol=1e-12)


def test_z_loss_and_soft_cap_by_their_formulas() -> None:
    x, target, weight = 8 * normal(9, 13), integers(13, 9), normal(13).abs()
    target[3] = -100
    capped = 5.0 * torch.tanh(x / 5.0)
    lse = capped.logsumexp(-1)
    counts = target != -100
    plain = F.cross_entropy(capped, target, weight=weight, reduction="none")
    z = torch.where(counts, 0.5 * weight[target.clamp_min(0)] * lse.square(), 0.0)
    options: dict[str, Any] = {"weight": weight, "z_loss": 0.5, "softcap": 5.0, "backend": "reference"}
    close = {"rtol": 1e-12, "atol": 1e-12}
    found = cross_entropy(x, target, reduction="none", return_lse=True, return_z_loss=True, **options)
    expected = (plain + z, torch.where(counts, lse, 0.0), z)
    for a, e in zip(found, expected, strict=True):
        torch.testing.assert_close(a, e, **close)
    total = weight[target[counts]].sum()
    for reduction, divisor in (("mean", total), ("sum", 1.0)):
        loss, part = cross_entropy(x, target, reduction=reduction, return_z_loss=True, **options)
        torch.testing.assert_close(loss, (plain + z).sum() / divisor, **close)
        torch.testing.assert_close(part, z.sum() / divisor, **close)


# --- digits -----------------------------------------------------------------------------------------------------------


@checked
@pytest.mark.parametrize("margin", [2.0, 10.0, 20.0, 40.0, 80.0])
def test_a_confident_token_keeps_its_digits(row: Row, margin: float) -> None:
    """Loss and gradient of a probability near 1, relative to themselves; lse - x would give 0 from a margin of 17."""
    for offset in (0.0, 50.0, -1000.0):
        x = normal(3, 67, dtype=torch.float32)
        target = integers(67, 3)
        x[torch.arange(3), target] = margin
        x += offset
        exact = x.double()
        others = exact.scatter(1, target[:, None], -math.inf).logsumexp(1)
        nll = torch.nn.functional.softplus(others - exact[torch.arange(3), target], threshold=1e9)
        assert (nll > 0).all()
        loss, grad = step(x.to(row.device), target.to(row.device), reduction="none", backend=row.backend)
        torch.testing.assert_close(loss.cpu().double(), nll, rtol=1e-5, atol=0)
        at_target = grad.cpu()[torch.arange(3), target].double()
        torch.testing.assert_close(at_target, torch.expm1(-nll), rtol=2e-5, atol=0)


# --- what is infinite, ignored or nothing -----------------------------------------------------------------------------

INFINITE = {
    "other -inf": {1: -math.inf},
    "target -inf": {0: -math.inf},
    "other inf": {1: math.inf},
    "target inf": {0: math.inf},
    "all -inf": dict.fromkeys(range(5), -math.inf),
    "all but target -inf": dict.fromkeys(range(1, 5), -math.inf),
    "NaN": {3: math.nan},
    "all NaN": dict.fromkeys(range(5), math.nan),
}


@checked
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("name", INFINITE)
def test_infinite_logits_are_as_torch_has_them(row: Row, name: str, label_smoothing: float) -> None:
    x = normal(2, 5, dtype=torch.float32)
    for column, value in INFINITE[name].items():
        x[1, column] = value
    target = torch.tensor([3, 0])
    given = x.clone().requires_grad_()
    expected = F.cross_entropy(given, target, reduction="none", label_smoothing=label_smoothing)
    (grad,) = torch.autograd.grad(expected.sum(), given)
    options: dict[str, Any] = {"reduction": "none", "label_smoothing": label_smoothing, "backend": row.backend}
    found = step(x.to(row.device), target.to(row.device), **options)
    torch.testing.assert_close(found[0].cpu(), expected.detach(), equal_nan=True)
    torch.testing.assert_close(found[1].cpu(), grad, equal_nan=True, atol=1e-6, rtol=1e-5)
    _, lse = cross_entropy(x.to(row.device), target.to(row.device), return_lse=True, **options)
    torch.testing.assert_close(lse.cpu(), x.logsumexp(-1), equal_nan=True)


@backends
@pytest.mark.parametrize("rows", [0, 3])
def test_a_mean_over_nothing_is_0(backend: str, device: str, rows: int) -> None:
    """Also where label smoothing gives the rows a loss, which torch divides by 0."""
    x = normal(rows, 5, dtype=torch.float32).to(device)
    first = torch.zeros(rows, dtype=torch.int64, device=device)
    ruled_out = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0], device=device)
    for weight, target in ((None, torch.full_like(first, -100)), (0 * ruled_out, first), (ruled_out, first)):
        for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1}):
            loss, grad = step(x, target, weight=weight, backend=backend, **options)
            assert loss.item() == 0.0
            assert torch.equal(grad, torch.zeros_like(x))


@pytest.mark.parametrize("bad", [-1, 7, 2**40, -(2**40)])
@pytest.mark.parametrize(
    "backend", [b for b in ("reference", "native") if b in fk.OPS["cross_entropy"].backends("cpu")]
)
def test_a_target_out_of_range_is_an_error_on_the_cpu(backend: str, bad: int) -> None:
    x, target = normal(3, 7, dtype=torch.float32), torch.tensor([0, bad, 6])
    with pytest.raises(IndexError, match=f"target must be in 0 .. 6 or ignore_index -100; got {bad}"):
        cross_entropy(x, target, backend=backend)
    assert torch.isfinite(cross_entropy(x, target, ignore_index=bad, backend=backend))


@checked
@pytest.mark.parametrize("bad", [-1, 7, 2**40, -(2**40)])
def test_a_target_out_of_range_is_nan_on_a_gpu(row: Row, bad: int) -> None:
    """And reads nothing, which the checker of CUDA kernels would see. Triton's interpreter stands for a GPU."""
    if row.backend == "native" and row.device == "cpu" and not row.cuda_on_cpu:
        pytest.skip("the CPU raises an error")
    x, target = normal(3, 7, dtype=torch.float32).to(row.device), torch.tensor([0, bad, 6], device=row.device)
    options: dict[str, Any] = {"weight": torch.ones(7, device=row.device), "label_smoothing": 0.1}
    loss, grad = step(x, target, reduction="none", backend=row.backend, **options)
    assert loss.isnan().tolist() == [False, True, False]
    assert grad.isnan().all(1).tolist() == [False, True, False]
    assert grad[::2].isfinite().all()
    assert cross_entropy(x, target, backend=row.backend, **options).isnan()


# --- what is kept, and the rest ---------------------------------------------------------------------------------------


@backends
def test_only_the_loss_is_differentiable(backend: str, device: str) -> None:
    x, target = torch.randn(4, 9, device=device, requires_grad=True), integers(9, 4).to(device)
    loss, lse, z = cross_entropy(x, target, z_loss=0.1, return_lse=True, return_z_loss=True, backend=backend)
    assert loss.requires_grad
    assert not lse.requires_grad
    assert not z.requires_grad
    assert loss.dtype == lse.dtype == z.dtype == torch.float32
    assert cross_entropy(x.bfloat16(), target, backend=backend).dtype == torch.float32


@needs_native
def test_the_bare_operators_check_too() -> None:
    """torch.ops.foundry_kernels.* are reachable without the public function."""
    x, target, ops = torch.ones(2, 4), torch.zeros(2, dtype=torch.int64), torch.ops.foundry_kernels
    rest = (-100, "mean", 0.0, 0.0, None)
    with pytest.raises(ValueError, match="target must have shape"):
        ops.cross_entropy(x, target[:1], None, *rest, False, False)
    with pytest.raises(ValueError, match="reduction must be one of none, mean, sum; got max"):
        ops.cross_entropy(x, target, None, -100, "max", 0.0, 0.0, None, False, False)
    with pytest.raises(TypeError, match="target must be int32 or int64"):
        ops.cross_entropy(x, x[:, 0], None, *rest, False, False)
    with pytest.raises(ValueError, match="weight must have shape"):
        ops.cross_entropy(x, target, x[0, :2], *rest, False, False)
    with pytest.raises(TypeError, match="unsupported dtype"):
        ops.cross_entropy(x.double(), target, None, *rest, False, False)
    with pytest.raises(IndexError, match=r"target must be in 0 \.\. 3"):
        ops.cross_entropy_bwd(x[0, 0], x, target + 4, None, x[:, 0], x[:, 0], None, *rest)
    with pytest.raises(ValueError, match="dloss must have a value for each loss"):
        ops.cross_entropy_bwd(x[0, 0], x, target, None, x[:, 0], x[:, 0], None, -100, "none", 0.0, 0.0, None)
    with pytest.raises(ValueError, match="lse and lse_low one for each token"):
        ops.cross_entropy_bwd(x[0, 0], x, target, None, x[:1, 0], x[:, 0], None, *rest)
    assert ops.cross_entropy(x.to("meta"), target.to("meta"), None, *rest, False, False)[0].shape == ()


def test_a_mean_of_sharded_logits_is_made_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the public function does with a DTensor gives the value of the reduction inside."""
    from foundry_kernels.ops import cross_entropy as package

    x, target, weight = normal(6, 11, dtype=torch.float32), integers(11, 6), normal(11, dtype=torch.float32).abs()
    target[1] = -100
    for reduction in ("mean", "sum"):
        for options in ({}, {"weight": weight}, {"z_loss": 0.1, "return_z_loss": True, "return_lse": True}):
            results: list[Any] = []
            for sharded in (False, True):
                monkeypatch.setattr(package, "is_dtensor", lambda logits, sharded=sharded: sharded)
                results.append(cross_entropy(x, target, reduction=reduction, **options))
            torch.testing.assert_close(*results)
    assert cross_entropy(x, torch.full_like(target, -100)).item() == 0.0
