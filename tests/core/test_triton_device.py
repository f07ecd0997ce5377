"""Triton launches on the current device, whatever its arguments are: the launchers make that of their tensors current.

No GPU is needed: tensors without memory say that they are on a second one, and what would be launched is recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels._triton import operators
from foundry_kernels._triton.devices import _capability
from foundry_kernels.core.registry import OpSpec, override
from foundry_kernels.testing import Arg, call

pytestmark = pytest.mark.skipif(not _triton.INTERPRET, reason="needs Triton's kernels, and no GPU that runs them")
#: Between its launches linear_cross_entropy calls operations of torch, which need a guard that is a GPU's.
OPS = [pytest.param(op, id=op.name) for op in fk.OPS.values() if op.impl("triton") and "linear" not in op.name]


class Devices:
    """Stands in for torch.cuda: which device is current, which one each launch went to, how often it was changed."""

    def __init__(self) -> None:
        self.current, self.launches, self.changes = 0, [], 0

    def current_device(self) -> int:
        return self.current

    def device(self, device: torch.device) -> Any:
        return _Current(self, device.index)

    def run(self, kernel: Any, *args: Any, **kwargs: Any) -> None:
        self.launches.append(self.current)


class _Current:
    def __init__(self, devices: Devices, index: int) -> None:
        self.devices, self.index = devices, index

    def __enter__(self) -> None:
        self.before, self.devices.current = self.devices.current, self.index
        self.devices.changes += 1

    def __exit__(self, *_: object) -> None:
        self.devices.current = self.before


class Launchers(TorchDispatchMode):
    """Tensors without memory would be given to the operators' fakes: here their launchers are called."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "foundry_kernels":
            return func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        return operators.LAUNCHERS[name](*args)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Iterator[Devices]:
    from foundry_kernels.ops.rms_norm.triton.kernels import rms_norm_fwd_kernel

    stand_in = Devices()
    monkeypatch.setattr(torch.cuda, "current_device", stand_in.current_device)
    monkeypatch.setattr(torch.cuda, "device", stand_in.device)
    monkeypatch.setattr(type(rms_norm_fwd_kernel), "run", lambda *args, **kwargs: stand_in.run(*args, **kwargs))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    h100 = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h100)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda self: 0)
    _capability.cache_clear()
    yield stand_in
    _capability.cache_clear()


def forward(op: OpSpec, device: str) -> tuple[Tensor, ...]:
    """Makes arguments of a case that needs no copy, in tensors without memory."""
    case = next(c for c in op.cases.CASES[op.name] if all(a is None or _regular(a) for a in c.args.values()))
    detached = {name: None if x is None else x.detach() for name, x in case.make(torch.bfloat16).items()}
    with torch.no_grad(), FakeTensorMode() as mode, override(op, "triton", devices=("cpu", "cuda")), Launchers():
        args = {name: None if x is None else mode.from_tensor(x).to(device) for name, x in detached.items()}
        return call(op, args, case.options, backend="triton")


def _regular(arg: Arg) -> bool:
    return arg.layout == "contiguous" and 0 not in arg.shape and (arg.dtype is not None or arg.shape[-1] % 16 == 0)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("current", [0, 1])
def test_kernels_go_to_the_device_of_their_tensors(op: OpSpec, current: int, devices: Devices) -> None:
    devices.current = current
    results = forward(op, "cuda:1")
    assert set(devices.launches) == {1}
    assert {x.device for x in results} == {torch.device("cuda:1")}
    assert devices.current == current, "the caller's device is not current again"
    assert devices.changes == (current != 1), "the device is changed only where it is another"


def test_backward_kernels_too(devices: Devices) -> None:
    """Autograd itself needs a build with CUDA for such tensors, the operator does not."""
    with FakeTensorMode(), Launchers():
        x, weight, rstd = (torch.empty(shape, device="cuda:1") for shape in ((8, 16), (16,), (8,)))
        torch.ops.foundry_kernels.triton_rms_norm_bwd(x, None, x, weight, rstd, 0.0, False, True, True)
    assert devices.launches == [1, 1]  # dx with parts of dw, and their sum
    assert devices.changes == 1


def test_the_device_is_restored_after_an_error(devices: Devices) -> None:
    def fails(x: Tensor) -> None:
        assert devices.current == 1
        raise RuntimeError("in a launcher")

    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    with pytest.raises(RuntimeError, match="in a launcher"):
        operators.on_its_device(fails)(x)
    assert devices.current == 0


def test_a_first_tensor_that_is_absent(devices: Devices) -> None:
    """q may be None where k alone is rotated."""
    with FakeTensorMode():
        x = torch.empty(2, device="cuda:1")
    assert operators.on_its_device(lambda *_: devices.current)(None, x, 0.5) == 1
