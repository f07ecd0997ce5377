"""What the argument `backend` means for a module, which runs several operations. All modules and models follow one
rule.

An operation called with a named backend uses it or raises. A module runs several operations, and not every operation
has a kernel in every backend. So a module chooses a backend for each operation at construction:

- the operation has a kernel of the named backend: that kernel is used. If it does not support a call (not built,
  another device, another dtype), the call raises `BackendUnavailable`; there is no fallback.
- the package has no such kernel for the operation, or has one for GPUs only and was compiled without CUDA: the
  reference is used. The module reports this in one warning, in its `backends` and in its repr.

A mapping `{operation: backend}` names the backend of single operations ("auto" for those that it leaves out). There is
no fallback: if there is no such kernel, construction raises.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import torch

from foundry_kernels.core.registry import OPS, BackendUnavailable, check_backend
from foundry_kernels.ops.flash_attention import hopper

Backend = str | Mapping[str, str]


def plan(backend: Backend, ops: Iterable[str]) -> dict[str, str]:
    """Returns the backend that each of `ops` is called with, by the rule above.

    Raises:
        TypeError: `backend` is neither a string nor a mapping.
        ValueError: an unknown backend or operation.
        BackendUnavailable: a mapping names a backend for which the operation has no kernel.
    """
    ops = tuple(ops)
    if isinstance(backend, str):
        check_backend(backend)
        absent = [op for op in ops if backend != "auto" and not _exists(op, backend)]
        if absent:
            warnings.warn(
                f"backend {backend!r} has no kernel yet for {', '.join(absent)}: the reference is used there",
                stacklevel=3,
            )
        return {op: "reference" if op in absent else backend for op in ops}
    if not isinstance(backend, Mapping):
        raise TypeError(f"backend must be a string or a mapping of operations to strings; got {type(backend).__name__}")
    for op, name in backend.items():
        if op not in OPS:
            raise ValueError(f"backend names an unknown operation {op!r}; there are {', '.join(OPS)}")
        check_backend(name)
        if name != "auto" and OPS[op].impl(name) is None:
            raise BackendUnavailable(f"{op} has no {name} kernel")
    return {op: backend.get(op, "auto") for op in ops}


def _exists(op: str, backend: str) -> bool:
    impl = OPS[op].impl(backend)
    return impl is not None and (impl.missing is not None or impl.devices != ())


def serving(backends: Mapping[str, str], device: str, dtype: torch.dtype) -> dict[str, str]:
    """Returns for each operation the backend that tensors of `dtype` on `device` run on, with "auto" resolved.

    A named backend that does not support them stays in the result, because only the call raises. For attention it is
    the backend of most calls, if it depends on the call (`ops/flash_attention/hopper.py`).
    """
    found = {}
    for op, name in backends.items():
        if name == "auto":
            order = OPS[op].order(device, dtype)
            attends = op in ("flash_attention", "flash_attention_varlen")
            if attends and hopper.supports(device, dtype) and not OPS[op].is_measured(device, dtype):
                order = ("native", *order)
            name = next((b for b in order if OPS[op].why_not(b, device, dtype) is None), "reference")
        found[op] = name
    return found


def without_extension(backends: Mapping[str, str], device: str, dtype: torch.dtype) -> tuple[tuple[str, ...], str]:
    """Returns the operations that run on the reference because the extension is missing, and why it is."""
    key = ("auto", device, dtype)
    reasons = {
        op: OPS[op].stand_ins[key][1] for op, name in backends.items() if name == key[0] and key in OPS[op].stand_ins
    }
    return tuple(reasons), next(iter(reasons.values()), "")


def describe(backends: Mapping[str, str]) -> str:
    """Returns the text for a repr: `'native'`, or `rope='reference', rms_norm='native'` if operations differ."""
    if len(set(backends.values())) == 1:
        return repr(next(iter(backends.values())))
    return ", ".join(f"{op}={name!r}" for op, name in backends.items())
