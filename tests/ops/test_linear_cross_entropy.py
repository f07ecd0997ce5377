"""linear_cross_entropy: what the table of cases cannot say of the chunks."""

from __future__ import annotations

import math
from typing import Any

import fresh
import pytest
import torch
import torch.nn.functional as F
from built import needs_native
from table import Allocations, rows, saved_tensors
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels.core import extension
from foundry_kernels.ops._linear_loss import chunks, sizes
from foundry_kernels.ops.linear_cross_entropy import linear_cross_entropy

ROWS = [r for r in rows("reference", "triton", "native") if r.op.name == "linear_cross_entropy"]
BACKENDS = [pytest.param(r.backend, r.device, id=r.id) for r in ROWS]
backends = pytest.mark.parametrize(("backend", "device"), BACKENDS)
kernels = pytest.mark.parametrize(("backend", "device"), [p for p in BACKENDS if p.values[0] != "reference"])
TOKENS, WIDTH, CLASSES = 13, 8, 21


def draw(device: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=g, dtype=torch.float64)
    weight = torch.randn(CLASSES, WIDTH, generator=g, dtype=torch.float64) / math.sqrt(WIDTH)
    target = torch.randint(CLASSES, (TOKENS,), generator=g).to(device)
    return hidden.to(device, dtype).requires_grad_(), weight.to(device, dtype).requires_grad_(), target


def gradients(loss: Tensor, *of: Tensor, **options: Any) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of, torch.ones_like(loss), **options)


def expected(hidden: Tensor, weight: Tensor, target: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(hidden @ weight.t(), target, **options)


def assert_near(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> None:
    for a, e in zip(found, exact, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_it_is_torchs_linear_and_cross_entropy(reduction: str) -> None:
    hidden, weight, target = draw("cpu")
    target[[2, 5]] = -100
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_size=4, backend="reference")
    exact = expected(hidden, weight, target, reduction=reduction)
    torch.testing.assert_close(loss, exact)
    assert_near(gradients(loss, hidden, weight), gradients(exact, hidden, weight))


@kernels
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_graph_is_walked_twice(backend: str, device: str, reduction: str) -> None:
    """And .grad, which the first pass may have given away, is added to."""
    hidden, weight, target = draw(device)
    loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, chunk_size=4, backend=backend).sum()
    loss.backward(retain_graph=True)
    once = weight.grad.clone(), hidden.grad.clone()
    loss.backward()
    assert torch.equal(weight.grad, 2 * once[0])
    assert torch.equal(hidden.grad, 2 * once[1])


@kernels
def test_nothing_of_the_logits_size_is_kept_or_made_at_once(backend: str, device: str) -> None:
    """What is saved, and the largest matrix that any operation gives back."""
    hidden, weight, target = draw(device)
    hidden = hidden.detach().repeat(40, 1).requires_grad_()
    target = target.repeat(40)
    logits = target.numel() * CLASSES
    for reduction in ("mean", "none"):
        with saved_tensors() as saved, Allocations() as made:
            loss = linear_cross_entropy(hidden, weight, target, reduction=reduction, backend=backend)
            gradients(loss, hidden, weight)
        assert max(t.numel() for t in saved) < logits / 2
        assert made.largest < logits / 2


@kernels
def test_half_precision_weights_under_autocast(backend: str, device: str) -> None:
    """float32 hidden over a bfloat16 weight: both are rounded to autocast's dtype, and gradients have their own."""
    hidden, weight, target = draw(device)
    low = weight.detach().bfloat16().requires_grad_()
    with torch.autocast(device, torch.bfloat16):
        loss = linear_cross_entropy(hidden, low, target, chunk_size=5, backend=backend)
        exact = expected(hidden, low, target)
    found, wanted = gradients(loss, hidden, low), gradients(exact, hidden, low)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact.float(), rtol=1e-2, atol=1e-2)
    for a, e in zip(found, wanted, strict=True):
        assert a.dtype == e.dtype
        torch.testing.assert_close(a, e, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fast", [False, True], ids=["slow", "fast"])
def test_both_ways_to_products(fast: bool, dtype: torch.dtype, has_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which one a processor takes depends on its instructions, and on PyTorch's products: where those of 16 bits are
    slow, they are in float32; where those of float32 are, logits are made by decode_linear's kernel."""
    if not any(r.backend == "native" for r in ROWS):
        pytest.skip("the C++ extension is not built")
    monkeypatch.setattr(chunks, "fast_products", lambda dtype: fast)
    monkeypatch.setattr(sizes, "SMALL", 0)
    monkeypatch.setattr(chunks, "_CLASSES", 8)  # of 21
    hidden, weight, target = draw("cpu", dtype)
    bias = torch.linspace(-1, 1, CLASSES).to(dtype).requires_grad_()
    target[4] = -100
    learned = [hidden, weight, *([bias] if has_bias else [])]
    wide = [x.detach().double().requires_grad_() for x in learned]
    exact = F.cross_entropy(0.5 * F.linear(*wide), target)
    rounded = fast and dtype == torch.bfloat16
    for chunk_size in (3, 64):
        options = {"bias": bias if has_bias else None, "logit_scale": 0.5, "chunk_size": chunk_size}
        loss = linear_cross_entropy(hidden, weight, target, backend="native", **options)
        assert abs(loss.item() - exact.item()) < (5e-3 if rounded else 1e-6)
        found, expected_ = gradients(loss, *learned), gradients(exact, *wide, retain_graph=True)
        for a, e in zip(found, expected_, strict=True):
            relative = 2**-7 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(a.double(), e, rtol=relative, atol=2e-3 if rounded else 1e-5)


@needs_native
def test_small_gradients_of_bfloat16_are_rounded_once() -> None:
    """After they are multiplied by the loss's own: within half a step of bfloat16."""
    hidden, weight, target = draw("cpu", torch.bfloat16)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    loss = linear_cross_entropy(hidden, weight, target, backend="native") * 0.3
    for a, e in zip(gradients(loss, hidden, weight), gradients(expected(*wide, target) * 0.3, *wide), strict=True):
        half = torch.ldexp(torch.ones_like(e), torch.frexp(e).exponent - 9)
        assert bool(((a.double() - e).abs() <= 1.01 * half).all())


@backends
def test_the_loss_and_the_lse_are_differentiable(backend: str, device: str) -> None:
    hidden, weight, target = draw(device)
    results = linear_cross_entropy(
        hidden, weight, target, z_loss=0.1, return_lse=True, return_z_loss=True, backend=backend
    )
    assert [r.requires_grad for r in results] == [True, True, False]


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_a_target_out_of_range_is_an_error_on_the_cpu(backend: str) -> None:
    hidden, weight, target = draw("cpu")
    if backend not in fk.OPS["linear_cross_entropy"].backends("cpu"):
        pytest.skip("the C++ extension is not built")
    target[3] = CLASSES
    with pytest.raises(IndexError, match=f"target must be in 0 .. {CLASSES - 1} or ignore_index -100; got {CLASSES}"):
        linear_cross_entropy(hidden, weight, target, backend=backend)


def test_limits_are_said_once() -> None:
    """`sizes.py` has them, with and without the extension, and the direct call takes them from there."""
    code = """
import sys
sys.modules["foundry_kernels._C"] = None
from foundry_kernels.ops._linear_loss import sizes
print(sizes.SMALL, sizes.SUMMED24)
"""
    alone = fresh.python("-c", code)
    assert alone.stdout.split() == [str(sizes.SMALL), str(sizes.SUMMED24)]
    if extension.MISSING is None:
        assert extension._C.get_single_chunk() == (sizes.SMALL, sizes.SUMMED24)
