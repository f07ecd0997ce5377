"""What calls of Triton's kernels ask about their arguments: in C++ (csrc/triton_calls.cpp) and, without the extension,
in Python. Both give the same answers, and None wherever the dispatcher has to see the call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from foundry_kernels import _triton
from foundry_kernels._triton import launch, operators
from foundry_kernels.core.extension import triton_call

pytestmark = [
    pytest.mark.skipif(_triton.MISSING is not None, reason=str(_triton.MISSING)),
    pytest.mark.skipif(triton_call("pointers") is None, reason="the extension is not built"),
]

X = torch.linspace(-1, 1, 32)


class Mine(Tensor):
    pass


class Wrapper(Tensor):
    @staticmethod
    def __new__(cls, x: Tensor) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


def escaped() -> Tensor:
    """A tensor that has outlived the transform which wrapped it."""
    kept: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x)
        return x * 2.0

    torch.func.vmap(keep)(X)
    return kept[0]


TENSORS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "a tensor": (lambda: X, True),
    "a view": (lambda: X[3:].view(1, 29), True),
    "a parameter": (lambda: torch.nn.Parameter(X), True),
    "one with a gradient": (lambda: X.clone().requires_grad_() * 2.0, True),
    "one of inference mode": (lambda: torch.inference_mode()(lambda: X * 2.0)(), True),
    "a subclass": (lambda: X.as_subclass(Mine), False),
    "a wrapper": (lambda: Wrapper(X), False),
    "a negated view": (lambda: torch.complex(X, X).conj().imag, False),
    "a conjugated view": (lambda: torch.complex(X, X).conj(), False),
    "a sparse tensor": (lambda: X.to_sparse(), False),
    "a fake tensor": (lambda: FakeTensorMode().from_tensor(X), False),
    "one without memory": (lambda: X.to("meta"), False),
    "one that has outlived its transform": (escaped, False),
}


def asked(*args: Any) -> list[int | None]:
    """In C++, and in Python, where it is by the places of tensors."""
    places = [(i, None) for i, x in enumerate(args) if x is None or isinstance(x, Tensor)]
    places += [(i, at) for i, x in enumerate(args) if isinstance(x, tuple) for at in range(len(x))]  # type: ignore[misc]
    return [triton_call("usual_device")(args), operators._asked_by_position(places)(args)]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("place", ["first", "last", "in options"])
def test_which_tensors_are_plain(name: str, place: str) -> None:
    make, plain = TENSORS[name]
    x = make()
    args = {"first": (x, None, X, 0.5), "last": (None, X, "silu", True, x), "in options": (X, (None, x))}[place]
    assert asked(*args) == [-1 if plain else None] * 2


def test_without_tensors_the_dispatcher_decides() -> None:
    assert asked(None, 1.0, (None,)) == [None, None]


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


WATCHES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], bool]] = {
    "nothing": (nullcontext, False),
    "no_grad": (torch.no_grad, False),
    "inference mode": (torch.inference_mode, False),
    "autocast": (lambda: torch.autocast("cpu"), False),
    "a mode of functions": (Functions, True),
    "a mode of operators": (Dispatched, True),
    "a profiler": (torch.profiler.profile, True),
}


@pytest.mark.parametrize("name", WATCHES)
def test_who_watches(name: str) -> None:
    watch, watches = WATCHES[name]
    with watch():
        found = asked(X, None)
    assert found == [None if watches else -1] * 2
    assert asked(X, None) == [-1, -1]


def test_a_tracer_watches() -> None:
    found = []

    def traced(x: Tensor) -> Tensor:
        found.append(asked(x))
        return x * 2.0

    torch.jit.trace(traced, X, check_trace=False)
    assert found[0] == [None, None]


def test_under_a_transform_pytorch_applies_the_function() -> None:
    """Its own `apply` refuses a function that has no rule for the transform."""
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: operators.apply(Double, x).sum())(X)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 2.0


def test_what_has_outlived_its_transform_is_left_to_pytorch() -> None:
    with pytest.raises(RuntimeError) as expected:
        Double.apply(escaped())
    with pytest.raises(RuntimeError) as got:
        operators.apply(Double, escaped())
    assert str(got.value) == str(expected.value)


# --- pointers ---------------------------------------------------------------------------------------------------------

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.bool,
    torch.uint8,
]


def test_kinds_tell_apart_what_python_tells_apart() -> None:
    several = [None, torch.nn.Parameter(X), X.as_subclass(Mine), torch.empty(0)]
    several += [torch.zeros(64, dtype=dtype)[offset:] for dtype, offset in product(DTYPES, range(3))]
    several += [x.to("meta") for x in several[1:] if x is not None and type(x) is Tensor]
    by_python: dict[Any, set[Any]] = {}
    by_extension: dict[Any, set[Any]] = {}
    for pair in product(several, repeat=2):
        extension, python = kinds_of(pair)
        by_python.setdefault(python, set()).add(extension)
        by_extension.setdefault(extension, set()).add(python)
    assert len(by_python) > 400
    assert all(len(others) == 1 for others in (*by_python.values(), *by_extension.values()))


def kinds_of(pair: tuple[Any, Any]) -> tuple[Any, Any]:
    found = triton_call("pointers")(pair), launch._pointers_in_python(None, 0, pair)
    for ours, theirs in zip(found[0][1], found[1][1], strict=True):
        assert ours is theirs or (isinstance(ours, int) and ours == theirs)
    return found[0][0], found[1][0]


def test_a_tensor_on_another_device_is_its_address() -> None:
    """On the CPU it stays a tensor, which Triton's launcher refuses where it is given one."""
    tensors = X, X.to("meta"), None
    for _, taken in (triton_call("pointers")(tensors), launch._pointers_in_python(None, 0, tensors)):
        assert taken[0] is X
        assert taken[1] == 0
        assert taken[2] is None


@pytest.mark.parametrize("value", [1, 0.5, "x", (X,), [X]], ids=str)
def test_what_is_no_tensor_is_left_to_triton(value: Any) -> None:
    assert triton_call("pointers")((X, value)) is None
