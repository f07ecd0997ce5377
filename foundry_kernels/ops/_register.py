"""Puts an operation into the registry with the kernels of its folder."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from foundry_kernels import _triton
from foundry_kernels.core import extension
from foundry_kernels.core.registry import Impl, OpSpec, register


def register_op(
    public: Callable[..., Any], reference: Callable[..., Any], native_devices: tuple[str, ...] = ("cpu", "cuda")
) -> OpSpec:
    """Register the operation whose public function is `public`.

    Its Triton and native kernels are the functions of the same name in the folder's modules `triton` and `native`; an
    operation whose folder lacks one of them has no such backend yet. `native_devices` are those that csrc has kernels
    of the operation for.
    """
    name, package = public.__name__, public.__module__
    impls = [Impl("reference", reference)]
    if find_spec(f"{package}.triton") is not None:
        impls.append(_triton.impl(package, name))
    if find_spec(f"{package}.native") is not None:
        impls.append(extension.impl(package, name, native_devices))
    return register(OpSpec(name, public, tuple(impls), package))
