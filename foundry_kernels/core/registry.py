"""The implementations of each operation, and the choice among them for a call.

An operation is one contract (`OpSpec`) with several implementations (`Impl`): a plain PyTorch reference, a Triton
kernel, a native (C++/CUDA) kernel. What can run here is decided when the package is imported; a call only compares a
device and a dtype, so the choice can be traced by `torch.compile(fullgraph=True)`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from foundry_kernels.core.contract import Bench, Cases, Fuzz, Sharding, load

BACKENDS = ("reference", "triton", "native")

#: Order in which `backend="auto"` tries the backends of a device; a device that is not listed gets the reference. On
#: the CPU Triton only runs in its interpreter, which is for tests.
AUTO_ORDER: dict[str, tuple[str, ...]] = {
    "cuda": ("triton", "native", "reference"),
    "cpu": ("native", "reference"),
}

#: Measured orders that are faster, by device, operation and dtype (see `tuning`).
_MEASURED_ORDER: dict[str, dict[tuple[str, str], tuple[str, ...]]] = {}

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that values of `dtype` are computed and summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BackendUnavailable(RuntimeError):
    """No implementation supports the call; the message says why for each backend."""


def no_direct_call(*_: Any) -> None:
    """Takes no call, so that all calls go through the checks of the public function and `resolve`."""


@dataclass(frozen=True)
class Impl:
    """One implementation of an operation.

    `fn` takes the operation's arguments, checked, without `backend`. `devices` and `dtypes` are those that it accepts
    (None: any device). `missing` says why it cannot be used in this process at all, and is fixed at import.
    """

    backend: str
    fn: Callable[..., Any]
    devices: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    missing: str | None = None
    hint: str = ""  # what to do about a device that is not among `devices`
    sources: tuple[str, ...] = ()  # native: the devices that csrc has kernels for, compiled into this build or not
    direct: Callable[..., Any] = no_direct_call  # native: see OpSpec.direct
    set_served: Callable[..., Any] = no_direct_call  # native: takes which calls on a GPU `direct` serves
    lacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by device: options not supported there

    def why_not(self, device: str, dtype: torch.dtype | None = None, needs: tuple[str, ...] = ()) -> str | None:
        """The reason why a tensor of `dtype` on `device` is not supported, or None if it is. `needs`: options that the
        call sets."""
        if self.missing is not None:
            return self.missing
        if self.devices is not None and device not in self.devices:
            return f"runs on {' and '.join(self.devices) or 'no device'}, not on {device}{self.hint}"
        if dtype is not None and dtype not in self.dtypes:
            return f"takes {', '.join(map(short_dtype, self.dtypes))}, not {short_dtype(dtype)}"
        for option in needs:
            if option in self.lacks.get(device, ()):
                return f"does not support {option} on {device}"
        return None


@dataclass(eq=False)
class OpSpec:
    """An operation: its public function, its implementations and the folder that holds everything about it.

    `impls` is replaced by `override` alone.

    `direct` is a fast path for common calls of the native kernels. It takes the public function's arguments by
    position, `backend` first, and returns None for calls that it does not support (csrc/direct.cpp lists those that it
    does). It replaces the checks, `resolve` and the kernel's operator in a fraction of the time that Python takes.

    `cuda_order`: the order in which "auto" tries the backends on a GPU, if it differs from `AUTO_ORDER`.
    """

    name: str
    public: Callable[..., Any]
    impls: tuple[Impl, ...]
    package: str
    cuda_order: tuple[str, ...] = AUTO_ORDER["cuda"]

    def __post_init__(self) -> None:
        self.choose()

    def choose(self) -> None:
        """Precomputes the answers of `resolve` for the devices of `AUTO_ORDER`, because every call needs one."""
        self.chosen = {
            (backend, device, dtype): impl.fn
            for device in AUTO_ORDER
            for dtype in FLOATS
            for backend in ("auto", *BACKENDS)
            if (impl := self._first(backend, device, dtype)) is not None
        }
        native = self.impl("native")
        #: Answers of "auto" on a CPU that would be the native kernel if its extension were built, each with the reason
        #: why it is not. They are not in `chosen`, so that only these calls ask whether to warn.
        self.stand_ins: dict[tuple[str, str, torch.dtype], tuple[Callable[..., Any], str]] = {}
        if native is not None and native.missing is not None and "cpu" in native.sources:
            for dtype in native.dtypes:
                first = self._first("auto", "cpu", dtype)
                if first is not None and first.backend == "reference":
                    key = ("auto", "cpu", dtype)
                    self.stand_ins[key] = (self.chosen.pop(key), native.missing)
        supported = native is not None and all(
            self.chosen.get((backend, "cpu", dtype)) is native.fn
            for backend in ("auto", "native")
            for dtype in native.dtypes
        )
        self.direct = native.direct if native is not None and supported else no_direct_call
        if native is not None:
            native.set_served(*self._served_on_cuda(native.fn))
        #: Whether "auto" and "native" are the native kernels on a CPU and no `override` has replaced these.
        self.native_on_cpu = self.direct is not no_direct_call

    def _served_on_cuda(self, native: Callable[..., Any]) -> tuple[int, int, int]:
        """Three bit masks with one bit for each dtype of the native kernels: whether on a GPU "native" is this
        function, whether "auto" is, and whether no order was measured."""
        bits = [(1 << i, dtype) for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16))]
        native_, auto = (
            sum(bit for bit, dtype in bits if self.chosen.get((backend, "cuda", dtype)) is native)
            for backend in ("native", "auto")
        )
        return native_, auto, sum(bit for bit, dtype in bits if native_ & bit and not self.is_measured("cuda", dtype))

    def _first(self, backend: str, device: str, dtype: torch.dtype, needs: tuple[str, ...] = ()) -> Impl | None:
        """The first implementation that `backend` allows and that supports such a tensor and these options."""
        for name in self.order(device, dtype) if backend == "auto" else (backend,):
            if (impl := self.impl(name)) is not None and impl.why_not(device, dtype, needs) is None:
                return impl
        return None

    def order(self, device: str, dtype: torch.dtype) -> tuple[str, ...]:
        """The order in which `backend="auto"` tries the backends."""
        default = self.cuda_order if device == "cuda" else AUTO_ORDER.get(device, ("reference",))
        measured = _MEASURED_ORDER.get(device, {}).get((self.name, short_dtype(dtype)), ())
        return (*measured, *(backend for backend in default if backend not in measured))

    def is_measured(self, device: str, dtype: torch.dtype) -> bool:
        """Whether `prefer` gave an order for such tensors."""
        return (self.name, short_dtype(dtype)) in _MEASURED_ORDER.get(device, ())

    def impl(self, backend: str) -> Impl | None:
        for impl in self.impls:
            if impl.backend == backend:
                return impl
        return None

    def why_not(
        self, backend: str, device: str, dtype: torch.dtype | None = None, needs: tuple[str, ...] = ()
    ) -> str | None:
        """The reason why `backend` does not support such a tensor with these options, or None if it does."""
        impl = self.impl(backend)
        return f"{self.name} has no {backend} kernel" if impl is None else impl.why_not(device, dtype, needs)

    def backends(self, device: str, dtype: torch.dtype | None = None) -> tuple[str, ...]:
        """The backends that support such a tensor."""
        return tuple(b for b in BACKENDS if self.why_not(b, device, dtype) is None)

    # The other modules of the folder, imported when asked for; None where the folder has no such module. What each may
    # offer is written in `foundry_kernels.core.contract`.

    @property
    def cases(self) -> Cases:
        found: Cases | None = load(Cases, self.package)
        if found is None:
            raise ModuleNotFoundError(f"{self.name} has no cases: {self.package}.cases does not exist")
        return found

    @property
    def bench(self) -> Bench | None:
        return load(Bench, self.package)

    @property
    def fuzz(self) -> Fuzz | None:
        return load(Fuzz, self.package)

    @property
    def sharding(self) -> Sharding | None:
        return load(Sharding, self.package)


OPS: dict[str, OpSpec] = {}


def register(spec: OpSpec) -> OpSpec:
    if spec.name in OPS:
        raise ValueError(f"an operation named {spec.name!r} is registered already")
    OPS[spec.name] = spec
    return spec


def prefer(device: str, orders: dict[tuple[str, str], tuple[str, ...]]) -> None:
    """From now on `backend="auto"` tries the backends of (operation, dtype) on `device` in these orders. Without an
    order here, `AUTO_ORDER` applies."""
    if orders != _MEASURED_ORDER.get(device, {}):
        _MEASURED_ORDER[device] = orders
        for spec in OPS.values():
            spec.choose()


@contextmanager
def override(spec: OpSpec, backend: str, **changes: Any) -> Iterator[Impl]:
    """In this block the operation's `backend` is its `Impl` with `changes`, such as another `fn` or other `devices`.

    For tests and tools. It applies to every thread of the process.

    Raises:
        KeyError: the operation has no such backend.
    """
    before = spec.impls
    own = spec.impl(backend)
    if own is None:
        raise KeyError(f"{spec.name} has no {backend} kernel")
    changed = replace(own, **{"direct": no_direct_call, "set_served": no_direct_call, **changes})
    spec.impls = tuple(changed if impl is own else impl for impl in before)
    spec.choose()
    try:
        yield changed
    finally:
        spec.impls = before
        spec.choose()


def resolve(
    spec: OpSpec, backend: str, x: Tensor, first: str | None = None, needs: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Returns the function that computes `x`: for "auto" that of the first usable backend; for a named backend its own,
    or an error. `first`: the backend that "auto" tries first for this call, unless an order was measured. `needs`:
    options that the call sets, of those that not every backend supports."""
    if is_subclass(x):
        _know_dtensor()
    if _transformed() and backend != "reference":
        backend = _transformable(spec, backend)
    device = "cpu" if x.is_cpu else "cuda" if x.is_cuda else x.device.type  # a device's type is a new string each time
    dtype = x.dtype
    if first is not None and backend == "auto" and not spec.is_measured(device, dtype):
        backend = backend if spec.why_not(first, device, dtype, needs) else first
    if isinstance(backend, str) and not needs:
        if (chosen := spec.chosen.get((backend, device, dtype))) is not None:
            return chosen
        if (stand_in := spec.stand_ins.get((backend, device, dtype))) is not None:
            _warn_of_stand_in(spec.name, stand_in[1], spec.why_not("triton", "cuda") is None)
            return stand_in[0]
    check_backend(backend)
    if (impl := spec._first(backend, device, dtype, needs)) is not None:
        return impl.fn
    raise BackendUnavailable(_refusal(spec, backend, device, dtype, needs))


def is_subclass(x: Tensor) -> bool:
    return type(x) is not Tensor and type(x) is not Parameter


def is_dtensor(x: Tensor) -> bool:
    """Whether x is a DTensor, without importing it. A fake tensor, which export traces with, is of another class
    too."""
    return is_subclass(x) and hasattr(x, "device_mesh")


#: Called once DTensor is in use, to register its rules. Set by the package.
_dtensor_rules: list[Callable[[], Any]] = []


def when_dtensor_is_used(register_rules: Callable[[], Any]) -> None:
    """Calls `register_rules` before the first call on DTensors, because importing DTensor takes half a second."""
    _dtensor_rules.append(register_rules)


def _know_dtensor() -> None:
    if "torch.distributed.tensor" in sys.modules:
        for register_rules in _dtensor_rules:
            register_rules()


def _transformed() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp, ...) or forward-mode differentiation is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


_warned_of_stand_in = False


def _warn_of_stand_in(op: str, reason: str, triton: bool) -> None:
    """Warns once per process that a CPU has only the reference because the extension is missing. With a GPU that Triton
    serves, nobody may need the extension, so there is no warning."""
    global _warned_of_stand_in
    if not _warned_of_stand_in:
        _warned_of_stand_in = True
        if not (triton and torch.cuda.is_available()):
            text = f"foundry_kernels: {op} runs on the reference, plain PyTorch, on this CPU: {reason} (said once)"
            warnings.warn(text, stacklevel=4)


# What torch.compiler.assume_constant_result sets: tracing calls these functions and keeps their results. (Calling it
# would import the compiler, which takes seconds. The compiler itself guards on a change of transforms.)
_know_dtensor._dynamo_marked_constant = True  # type: ignore[attr-defined]
_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
_warn_of_stand_in._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _transformable(spec: OpSpec, backend: str) -> str:
    """The backend under a transform. Kernels have no rule for transforms, and torch would assume a zero derivative."""
    check_backend(backend)
    if backend == "auto":
        return "reference"
    raise BackendUnavailable(
        f"{spec.name}: backend {backend!r} supports neither torch.func transforms (grad, vmap, jvp, ...) nor "
        "forward-mode differentiation; use backend 'reference', or 'auto', which falls back to it there"
    )


def check_backend(backend: str) -> None:
    """Raise ValueError unless `backend` is "auto" or one of `BACKENDS`."""
    if backend != "auto" and backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(('auto', *BACKENDS))}; got {backend!r}")


def _refusal(spec: OpSpec, backend: str, device: str, dtype: torch.dtype, needs: tuple[str, ...]) -> str:
    reasons = [f"  {b}: {spec.why_not(b, device, dtype, needs) or 'usable'}" for b in BACKENDS]
    asked = "no backend" if backend == "auto" else f"backend {backend!r}"
    options = f" with {', '.join(needs)}" if needs else ""
    return "\n".join([f"{spec.name}: {asked} does not support {short_dtype(dtype)} on {device}{options}", *reasons])


def short_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
