"""A stub of a GPU that records launches, for launches.py.

Nothing is compiled. A compiled kernel is replaced by its compiler input, so that two launches have equal kernels if
Triton's specialisation is equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import triton
from stub_gpu import StubDriver, stub_gpu, uncompiled
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from foundry_kernels._triton import launch


class Recorder(StubDriver):
    def __init__(self) -> None:
        super().__init__()
        self.device, self.stream = 0, 100
        self.launches: list[tuple[Any, ...]] = []
        self.get_current_device = lambda: self.device
        self.get_current_stream = lambda device: 1000 * device + self.stream

    def launch(self, *args: Any) -> None:
        self.launches.append(args)

    def take(self) -> list[tuple[Any, ...]]:
        taken, self.launches = self.launches, []
        return taken


def compiled(driver: Recorder, src: Any, options: dict[str, Any]) -> CompiledKernel:
    made_of = (src.fn.__name__, driver.device, str(src.signature), str(src.constants), str(src.attrs), str(options))
    return uncompiled(driver, src, made_of)


@pytest.fixture(scope="session")
def process() -> Iterator[Recorder]:
    driver = Recorder()
    with pytest.MonkeyPatch.context() as patch, stub_gpu(driver):
        patch.setattr(triton.compiler, "compile", lambda src, target, options: compiled(driver, src, options))
        yield driver


@pytest.fixture
def gpu(process: Recorder) -> Recorder:
    process.take()
    process.device, process.stream = 0, 100
    return process


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that Triton itself launches; recording does not change the launch path."""
    seen: list[str] = []
    own = JITFunction.run

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(kernel.__name__)
        return own(kernel, *args, **kwargs)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(launch, "_RUN", run)
    return seen
