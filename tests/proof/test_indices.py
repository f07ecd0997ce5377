"""Indices that a backward pass reads again are checked again: their memory may have been written to in the meantime.

Through numpy autograd does not see it. Kernels on the CPU then name the argument, as the forward pass does. Triton's,
which cannot raise, read and write nothing outside the tensors. Ordinary writes are reported by autograd.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels.nn import moe

#: The result of a call and what it takes gradients of.
Made = tuple[Tensor, list[Tensor]]


@dataclass(frozen=True)
class Call:
    op: str
    #: The argument, and the element of it that is overwritten.
    name: str
    at: int
    index: list[int]
    #: `run(backend, index)`, on the CPU.
    run: Callable[[str, Tensor], Made]
    #: Backends whose backward pass reads the argument. The others have the gradients of the call as it was.
    readers: tuple[str, ...] = ("native", "triton")
    dtypes: tuple[torch.dtype, ...] = (torch.int64, torch.int32)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), requires_grad=True)


def weights(n: int) -> Tensor:
    return torch.linspace(0.5, 2.0, n)


def cross_entropy(**options: Any) -> Callable[[str, Tensor], Made]:
    def run(backend: str, index: Tensor) -> Made:
        logits = draw(5, 7)
        return fk.cross_entropy(logits, index, weight=weights(7), backend=backend, **options), [logits]

    return run


def linear_cross_entropy(**options: Any) -> Callable[[str, Tensor], Made]:
    def run(backend: str, index: Tensor) -> Made:
        hidden, weight = draw(5, 4), draw(7, 4)
        return fk.linear_cross_entropy(hidden, weight, index, backend=backend, **options), [hidden, weight]

    return run


def rope(backend: str, index: Tensor) -> Made:
    q, k, tables = draw(2, 3, 5, 8), draw(2, 1, 5, 8), fk.rope_table(8, 9)
    return torch.cat(fk.rope(q, k, *tables, positions=index, backend=backend), 1), [q, k]


def qk_norm_rope(backend: str, index: Tensor) -> Made:
    q, k, w, tables = draw(2, 3, 5, 8), draw(2, 1, 5, 8), draw(8), fk.rope_table(8, 9)
    out = fk.qk_norm_rope(q, k, w, w, *tables, positions=index.view(1, 5).expand(2, 5), backend=backend)
    return torch.cat(out, 1), [q, k, w]


def combine_experts(backend: str, index: Tensor) -> Made:
    x, w = draw(6, 8), draw(3, 2)
    return fk.combine_experts(x, w, index.view(3, 2), backend=backend), [x, w]


def gather(backend: str, index: Tensor) -> Made:
    x = draw(3, 8)
    return moe._Gather.apply(x, torch.tensor([0, 2, 1, 2, 1, 0]), index.view(3, 2), backend), [x]


def grouped_mm(backend: str, index: Tensor) -> Made:
    x, weight = draw(6, 4), draw(3, 4, 5)
    return fk.grouped_mm(x, weight, index, backend=backend), [x, weight]


def attention(of_keys: bool) -> Callable[[str, Tensor], Made]:
    def run(backend: str, index: Tensor) -> Made:
        q, k, v = draw(9, 2, 8), draw(9, 1, 8), draw(9, 1, 8)
        lengths = (index.clone(), index) if of_keys else (index, index.clone())
        return fk.flash_attention_varlen(q, k, v, *lengths, 9, 9, causal=True, backend=backend), [q, k, v]

    return run


TARGET: dict[str, Any] = {"name": "target", "at": 3, "index": [6, 0, -100, 2, 2]}
LOSSES: dict[str, dict[str, Any]] = {
    "none": {"reduction": "none"},
    "tiles sum": {"reduction": "sum", "chunk_size": "tiles"},
    "tiles weighted sum": {"reduction": "sum", "chunk_size": "tiles", "class_weight": weights(7)},
    "tiles weighted none": {"reduction": "none", "chunk_size": "tiles", "class_weight": weights(7)},
    "tiles weighted": {"chunk_size": "tiles", "class_weight": weights(7)},
}
CALLS = {
    **{f"cross_entropy {r}": Call("cross_entropy", run=cross_entropy(reduction=r), **TARGET) for r in ("none", "mean")},
    **{
        f"linear_cross_entropy {name}": Call("linear_cross_entropy", run=linear_cross_entropy(**options), **TARGET)
        for name, options in LOSSES.items()
    },
    "linear_cross_entropy chunks": Call(
        "linear_cross_entropy", run=linear_cross_entropy(chunk_size=2), readers=(), **TARGET
    ),
    "rope": Call("rope", "positions", 2, [8, 0, 3, 3, 1], rope),
    "qk_norm_rope": Call("qk_norm_rope", "positions", 2, [8, 0, 3, 3, 1], qk_norm_rope),
    "combine_experts": Call("combine_experts", "slots", 4, [5, 0, -1, 2, 1, 3], combine_experts),
    "grouped_mm": Call(
        "grouped_mm", "offs", -1, [2, 2, 6], grouped_mm, ("reference", "native", "triton"), (torch.int32,)
    ),
    "cu_seqlens_q": Call("flash_attention_varlen", "cu_seqlens_q", -1, [0, 4, 4, 9], attention(False)),
    "cu_seqlens_k": Call("flash_attention_varlen", "cu_seqlens_k", -1, [0, 4, 4, 9], attention(True)),
}


def over_calls(*backends: str, dtypes: int = 2) -> pytest.MarkDecorator:
    """Each call on these of its operation's backends, with the first dtypes of its index."""
    return pytest.mark.parametrize(
        ("call", "backend", "dtype"),
        [
            pytest.param(call, backend, dtype, id=f"{name}-{backend}-{dtype}".replace("torch.", ""))
            for name, call in CALLS.items()
            for backend in fk.OPS[call.op].backends("cpu")
            if backend in backends
            for dtype in call.dtypes[:dtypes]
        ],
    )


def gradients(call: Call, backend: str, dtype: torch.dtype, overwrite: int | None = None) -> list[Tensor]:
    index = torch.tensor(call.index, dtype=dtype)
    out, inputs = call.run(backend, index)
    if overwrite is not None:
        version, memory = index._version, index.numpy()
        memory[call.at] = np.clip(overwrite, np.iinfo(memory.dtype).min, np.iinfo(memory.dtype).max)
        assert index._version == version
    return list(torch.autograd.grad(out, inputs, torch.ones_like(out)))


@over_calls("reference", "native")
@pytest.mark.parametrize("bad", [2**33, -(2**33)])
def test_what_is_read_again_is_checked_again(call: Call, backend: str, dtype: torch.dtype, bad: int) -> None:
    if backend in call.readers:
        with pytest.raises((IndexError, ValueError), match=rf"^{call.name} must"):
            gradients(call, backend, dtype, bad)
        return
    for found, right in zip(gradients(call, backend, dtype, bad), gradients(call, backend, dtype), strict=True):
        assert torch.equal(found, right)


def span(tensor: Tensor) -> tuple[int, int] | None:
    """The addresses of a tensor's memory; None where it has none, as what other tests' fake tensors leave behind."""
    storage = tensor.untyped_storage()
    try:
        return (storage.data_ptr(), storage.data_ptr() + storage.nbytes()) if storage.nbytes() else None
    except RuntimeError:  # memory of no device
        return None


class Checked:
    """Triton's interpreter, whose loads and stores must lie within tensors."""

    def __init__(self, interpreter: Any) -> None:
        self._interpreter, self._starts, self._stops = interpreter, np.empty(0, np.uint64), np.empty(0, np.uint64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def load(self, at: Any, mask: Any, *rest: Any) -> Any:
        self._check(at, mask)
        return self._interpreter.load(at, mask, *rest)

    def store(self, at: Any, value: Any, mask: Any) -> Any:
        self._check(at, mask)
        return self._interpreter.store(at, value, mask)

    def _check(self, at: Any, mask: Any) -> None:
        used = np.asarray(at)[np.asarray(mask, bool)]
        if not self._within(used):  # of a tensor that is new
            tensors = [t for t in gc.get_objects() if type(t) is Tensor and t.device.type == "cpu"]
            self._starts, self._stops = np.array(sorted(filter(None, map(span, tensors))), np.uint64).T
            assert self._within(used), "an access outside all tensors"

    def _within(self, used: Any) -> bool:
        nearest = np.searchsorted(self._starts, used, side="right") - 1
        return not used.size or bool((nearest >= 0).all() and (used < self._stops[nearest]).all())


@pytest.fixture
def checked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if not _triton.INTERPRET:
        pytest.skip("needs Triton's interpreter")
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter, "_interpreter", Checked(interpreter._interpreter))


@over_calls("triton", dtypes=1)
@pytest.mark.parametrize("bad", [2**33, pytest.param(-(2**33), marks=pytest.mark.slow)])
@pytest.mark.usefixtures("checked_memory")
def test_triton_reads_nothing_outside(
    call: Call, backend: str, dtype: torch.dtype, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients of an index that there is not are NaN, and ends beyond the last row are cut to it."""
    from foundry_kernels.ops.rope.triton import launch

    monkeypatch.setattr(launch, "check_positions", lambda *_: None)  # which is for the CPU alone
    found = gradients(call, backend, dtype, bad)
    if call.name in ("target", "positions") or (call.name == "slots" and bad > 0):
        assert any(each.isnan().any() for each in found) == (backend in call.readers)
    elif bad > 0:
        for each, right in zip(found, gradients(call, backend, dtype), strict=True):
            assert torch.equal(each, right)


@pytest.mark.parametrize("outside", [8, 2**33])
@pytest.mark.usefixtures("checked_memory")
def test_the_check_of_triton_sees_an_access_outside(outside: int) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def copy(x_ptr: Any, y_ptr: Any, at: Any) -> None:
        tl.store(y_ptr, tl.load(x_ptr + at))

    x, y = torch.randn(1 << 16), torch.zeros(1)
    copy[(1,)](x, y, 7)
    assert y == x[7]
    with pytest.raises(Exception, match="an access outside all tensors"):
        copy[(1,)](x[-4:], y, (1 << 40) + outside)


@pytest.mark.parametrize("backend", fk.OPS["combine_experts"].backends("cpu"))
def test_the_experts_of_tokens_are_checked_again(backend: str) -> None:
    """Calls the public function, on which the gradient of a layer's gathered rows is built."""
    call = Call("combine_experts", "slots", 4, [5, 0, 4, 2, 1, 3], gather)
    with pytest.raises(IndexError, match=r"^slots must be -1 or a row of x, 0 \.\. 5; got 8589934592"):
        gradients(call, backend, torch.int64, 2**33)


@over_calls("native", "triton", dtypes=1)
def test_what_autograd_sees_is_reported(call: Call, backend: str, dtype: torch.dtype) -> None:
    if backend not in call.readers:
        pytest.skip("it is not read again")
    index = torch.tensor(call.index, dtype=dtype)
    out, inputs = call.run(backend, index)
    index[call.at] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, inputs, torch.ones_like(out))
