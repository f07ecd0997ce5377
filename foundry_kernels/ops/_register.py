"""Puts an operation into the registry with the kernels of its folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from foundry_kernels import _triton
from foundry_kernels.core import extension
from foundry_kernels.core.registry import AUTO_ORDER, Impl, OpSpec, register

#: The order of "auto" on a GPU for operations whose native kernels take at most 3 % longer than Triton's, forward and
#: backward together, on an H100 (benchmarks/results/h100-81e711d.json). They go first because a native call takes less
#: host time.
NATIVE_FIRST = ("native", "triton", "reference")


def register_op(
    public: Callable[..., Any],
    reference: Callable[..., Any],
    native_devices: tuple[str, ...] = ("cpu", "cuda"),
    cuda_order: tuple[str, ...] = AUTO_ORDER["cuda"],
    lacks: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType({}),
) -> OpSpec:
    """Registers the operation whose public function is `public`; see `make_spec`."""
    return register(make_spec(public, reference, native_devices, cuda_order, lacks))


def make_spec(
    public: Callable[..., Any],
    reference: Callable[..., Any],
    native_devices: tuple[str, ...] = ("cpu", "cuda"),
    cuda_order: tuple[str, ...] = AUTO_ORDER["cuda"],
    lacks: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType({}),
) -> OpSpec:
    """The operation whose public function is `public`.

    Its Triton and native kernels are the functions of the same name in the folder's modules `triton` and `native`; an
    operation whose folder lacks one of them does not have this backend. `native_devices` are the devices for which csrc
    has kernels of the operation; `cuda_order` is the order in which "auto" tries the backends on a GPU; `lacks` are, by
    backend and device, the options that it does not support.
    """
    name, package = public.__name__, public.__module__
    impls = [Impl("reference", reference)]
    if find_spec(f"{package}.triton") is not None:
        impls.append(_triton.impl(package, name))
    if find_spec(f"{package}.native") is not None:
        impls.append(extension.impl(package, name, native_devices))
    impls = [replace(impl, lacks=lacks[impl.backend]) if impl.backend in lacks else impl for impl in impls]
    return OpSpec(name, public, tuple(impls), package, cuda_order)
