"""Launchers are called directly only where the dispatcher would have nothing else to do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.ops.rms_norm import RMS_NORM

DEVICE = "cpu" if _triton.INTERPRET else "cuda"
pytestmark = pytest.mark.skipif(
    RMS_NORM.why_not("triton", DEVICE) is not None, reason=str(RMS_NORM.why_not("triton", DEVICE))
)
FORWARD, BACKWARD = "foundry_kernels::triton_rms_norm_fwd", "foundry_kernels::triton_rms_norm_bwd"


def norm(x: Tensor) -> Tensor:
    return fk.rms_norm(x, backend="triton")


def draw() -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(DEVICE)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of this package's operators as they are called."""
    names: list[str] = []
    own = torch._ops.OpOverload.__call__

    def call(self, /, *args, **kwargs):
        if self.namespace == "foundry_kernels":
            names.append(self._schema.name)
        return own(self, *args, **kwargs)

    monkeypatch.setattr(torch._ops.OpOverload, "__call__", call)
    return names


def test_plain_tensors_are_not_dispatched(dispatched: list[str]) -> None:
    x = draw().requires_grad_()
    torch.autograd.grad(norm(x).sum(), x)
    with torch.no_grad():
        norm(x)
    with torch.inference_mode():
        norm(draw())
    norm(torch.nn.Parameter(draw()))
    assert dispatched == []


@pytest.mark.parametrize(
    ("watch", "expected"),
    [
        (Functions, [FORWARD]),  # backward passes run outside of such a mode
        (Dispatches, [FORWARD, BACKWARD]),
        (torch.profiler.profile, [FORWARD, BACKWARD]),
        (nullcontext, []),
    ],
)
def test_what_watches_sees_the_operators(
    watch: Callable[[], AbstractContextManager[object]], expected: list[str], dispatched: list[str]
) -> None:
    x = draw().requires_grad_()
    with watch():
        y = norm(x)
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert list(dict.fromkeys(dispatched)) == expected  # a mode calls what it sees once more


def test_subclasses_are_dispatched(dispatched: list[str]) -> None:
    assert type(norm(draw().as_subclass(Subclass))) is Subclass
    assert FORWARD in dispatched


def test_a_lazy_negation_is_resolved(dispatched: list[str]) -> None:
    """Its memory holds the values before the negation."""
    x = torch.complex(draw(), draw() + 1).conj().imag
    assert x.is_neg()
    torch.testing.assert_close(norm(x), norm(x.resolve_neg()))
    assert dispatched == [FORWARD]


def test_zeros_without_memory(dispatched: list[str]) -> None:
    x = torch._efficientzerotensor((4, 16), device=DEVICE)
    assert norm(x).eq(0).all()
    assert dispatched == [FORWARD]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_has_the_operator() -> None:
    traced = torch.jit.trace(norm, draw(), check_trace=False)
    assert FORWARD in str(traced.graph)


def test_absent_results_of_the_operator_are_empty_tensors() -> None:
    y, h, rstd = torch.ops.foundry_kernels.triton_rms_norm_fwd(draw(), None, None, 1e-6, 0.0, False, False)
    assert y.shape == (4, 16)
    assert h.shape == rstd.shape == (0,)


@pytest.mark.parametrize("eps", [1, 1.0])
def test_equal_numbers_of_other_types_share_a_plan(eps: float) -> None:
    """The operator's schema would have made floats of them."""
    expected = fk.rms_norm(draw(), eps=1.0, backend="reference")
    torch.testing.assert_close(fk.rms_norm(draw(), eps=eps, backend="triton"), expected)
