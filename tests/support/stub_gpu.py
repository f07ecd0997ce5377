"""A GPU that launches nothing, to run the host's part of Triton calls on a machine without a GPU.

Kernels are compiled for the architecture, arguments are bound and launchers are called as on a GPU, but the last call,
into the driver, does nothing. Tensors are on the CPU, and results are uninitialised.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import foundry_kernels as fk
from foundry_kernels import _triton
from foundry_kernels._triton import devices, operators
from foundry_kernels.core.registry import override


class StubDriver:
    """Triton's driver of a GPU, without the launch."""

    def __init__(self, arch: int = 90, multiprocessors: int = 132) -> None:
        from triton.backends.compiler import GPUTarget

        self.target, self.multiprocessors = GPUTarget("cuda", arch, 32), multiprocessors
        self.launcher_cls = lambda src, metadata: self.launch
        self.utils = SimpleNamespace(load_binary=self._load, get_device_properties=self._properties)

    def launch(self, *args: Any) -> None:
        """Has the arguments of a compiled kernel's launch: grid, stream, function, metadata, hooks and the kernel's
        arguments."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target

    def _load(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, str, int, int, int]:
        return None, name, 0, 0, 1024

    def _properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": self.multiprocessors}


def uncompiled(driver: StubDriver, src: Any, function: Any = None) -> Any:
    """Returns a compiled kernel without code. Triton passes `function` to the launch."""
    from triton.compiler import CompiledKernel

    kernel = CompiledKernel.__new__(CompiledKernel)
    # Nothing is loaded, so Triton 3.8 must not unload it when the kernel is no longer used.
    kernel.module, kernel._init_handles = None, lambda: None
    kernel.src, kernel.name, kernel._run = src, src.fn.__name__, driver.launch
    kernel.metadata, kernel.function = SimpleNamespace(target=driver.target), function
    kernel.packed_metadata = ("metadata of", src.fn.__name__)
    return kernel


def why_not() -> str | None:
    """Returns the reason why this process cannot use a stub, or None."""
    _triton.load()
    if _triton.MISSING is not None:
        return _triton.MISSING
    if _triton.INTERPRET:
        return "kernels that are interpreted cannot be compiled: unset TRITON_INTERPRET"
    return None


@contextmanager
def stub_gpu(driver: StubDriver) -> Iterator[None]:
    """In this block, Triton kernels accept CPU tensors and are launched by `driver`."""
    from triton.runtime.driver import driver as drivers

    operators.serve_cpu_tensors()
    with ExitStack() as undo:
        for op in fk.OPS.values():
            if op.impl("triton") is not None:
                undo.enter_context(override(op, "triton", devices=("cpu", "cuda")))
        undo.callback(devices.record_for, devices._RECORDED, devices._RECORDED_MULTIPROCESSORS)
        devices.record_for(driver.target.arch, driver.multiprocessors)
        drivers.set_active(driver)
        yield
