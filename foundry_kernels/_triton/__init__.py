"""Shared code of the Triton kernels. It can be imported without Triton, and then states why Triton is missing.

If Triton's variable TRITON_INTERPRET=1 is set before this package is imported, every kernel runs on the CPU in Triton's
interpreter. It is slow; the kernels are tested this way without a GPU.

Importing Triton and the kernels takes as long as the rest of the package. So they are imported on first use: when CUDA
is initialised, before any tensor is on a GPU (see `tuning.start`); when someone looks up an operator that torch does
not know yet, as a saved graph does; and when a kernel is called, for example on fake tensors. In the interpreter they
are imported with the package.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from foundry_kernels.core.registry import OPS, Impl

_OLDEST = (3, 6)


def _release() -> str:
    """The version of Triton, read from its sources; Triton is only imported if they do not state it.

    Raises:
        ImportError: there is none.
    """
    if "triton" not in sys.modules and (spec := find_spec("triton")) is not None and spec.origin is not None:
        said = re.search(r"^__version__ = ['\"]([\d.]+[^'\"]*)['\"]", Path(spec.origin).read_text(), re.MULTILINE)
        if said is not None:
            return said[1]
    version: str = importlib.import_module("triton").__version__
    return version


def _interprets() -> bool:
    """Whether Triton interprets kernels, according to Triton itself if it is imported."""
    if "triton" not in sys.modules and not os.environ.get("TRITON_INTERPRET"):
        return False
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


#: Some launches depend on it, because compilers allocate registers differently.
VERSION: tuple[int, ...] = (0, 0)
#: The reason why there are no kernels, or None. If an installed Triton cannot be imported, this is only known after
#: trying.
MISSING: str | None = None
INTERPRET = False
try:
    _found = _release()
    VERSION = tuple(map(int, _found.split(".")[:2]))
    MISSING = f"Triton {_found} is older than 3.6; `pip install -U triton`" if VERSION < _OLDEST else None
    INTERPRET = MISSING is None and _interprets()
except (ImportError, ValueError) as error:
    MISSING = f"Triton does not import ({error}); `pip install triton`"

#: float64 is for `gradcheck` in the interpreter; on a GPU the reference computes it.
DTYPES = (torch.float32, torch.bfloat16, torch.float16) + ((torch.float64,) if INTERPRET else ())

#: The packages whose kernels are not imported yet.
_waiting: list[str] = []


def impl(package: str, function: str) -> Impl:
    """The Triton backend of an operation: `function` of its `triton` module, or the reason why there is none."""
    if MISSING is not None:
        return Impl("triton", _absent, ("cuda",), DTYPES, missing=MISSING)
    if INTERPRET:
        return Impl("triton", _kernel(package, function), ("cpu",), DTYPES)
    _waiting.append(package)
    hint = "; set TRITON_INTERPRET=1 before the import to interpret it on the CPU"
    return Impl("triton", _by_first_use(package, function), ("cuda",), DTYPES, hint=hint)


def _absent(*_: Any) -> Any:
    raise AssertionError("a missing backend was called")  # resolve() never hands it out


def _kernel(package: str, function: str) -> Callable[..., Any]:
    found: Callable[..., Any] = getattr(importlib.import_module(package + ".triton"), function)
    return found


def _by_first_use(package: str, function: str) -> Callable[..., Any]:
    """The function, which is imported by a call. A trace contains the function and not the import."""

    def find() -> Callable[..., Any]:
        with _compiled():
            return _kernel(package, function)

    find._dynamo_marked_constant = True  # type: ignore[attr-defined]  # see `core.registry`

    def call(*args: Any) -> Any:
        return find()(*args)

    return call


class _compiled:
    """In this block, newly defined kernels are compiled, even if TRITON_INTERPRET was set after the import."""

    def __enter__(self) -> None:
        self.before = os.environ.pop("TRITON_INTERPRET", None)

    def __exit__(self, *_: Any) -> None:
        if self.before is not None:
            os.environ["TRITON_INTERPRET"] = self.before


def load() -> bool:
    """Imports the kernels of all operations and registers them. Returns whether they had not been imported before."""
    global MISSING
    if not _waiting:
        return False
    packages = dict.fromkeys(_waiting)
    _waiting.clear()
    _operators.__class__ = _BASE
    try:
        with _compiled():
            for package in packages:
                importlib.import_module(package + ".triton")
    except ImportError as error:
        MISSING = f"Triton does not import ({error}); `pip install triton`"
    for spec in OPS.values():
        changed = [_completed(spec.package, spec.name, each) for each in spec.impls]
        spec.impls = tuple(changed)
        spec.choose()
    return True


def _completed(package: str, function: str, found: Impl) -> Impl:
    if found.backend != "triton":
        return found
    if MISSING is not None:
        return replace(found, fn=_absent, missing=MISSING)
    return replace(found, fn=_kernel(package, function))


# --- operators by name ------------------------------------------------------------------------------------------------

_operators: Any = torch.ops.foundry_kernels
_BASE = type(_operators)


class _Operators(_BASE):  # type: ignore[misc, valid-type]
    """`torch.ops.foundry_kernels` until the kernels are imported: a saved graph may name their operators."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or not load():
                raise
            return getattr(self, name)  # whose class `load` has changed


def await_operators() -> None:
    """From now on, looking up an unknown operator imports the kernels first."""
    if _waiting:
        _operators.__class__ = _Operators
