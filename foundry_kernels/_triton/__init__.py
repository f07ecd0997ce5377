"""What the Triton kernels of several operations share. Without Triton it still imports, and says why Triton is missing.

Triton's own variable TRITON_INTERPRET=1, set before this package is imported, makes every kernel run on the CPU in
Triton's interpreter: slow, and how the kernels are tested without a GPU.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from foundry_kernels.core.registry import Impl

try:
    import triton

    #: By which some launches are chosen: the compilers allot registers differently.
    VERSION: tuple[int, ...] = tuple(map(int, triton.__version__.split(".")[:2]))
    MISSING = f"Triton {triton.__version__} is older than 3.6; `pip install -U triton`" if VERSION < (3, 6) else None
    INTERPRET = MISSING is None and bool(triton.knobs.runtime.interpret)
except ImportError as error:
    MISSING = f"Triton does not import ({error}); `pip install triton`"
    INTERPRET = False
    VERSION = (0, 0)

#: float64 is for `gradcheck` in the interpreter; on a GPU the reference computes it.
DTYPES = (torch.float32, torch.bfloat16, torch.float16) + ((torch.float64,) if INTERPRET else ())


def impl(package: str, function: str) -> Impl:
    """The Triton backend of an operation: `function` of its `triton` module, or the reason why there is none."""
    if MISSING is not None:
        return Impl("triton", _absent, ("cuda",), DTYPES, missing=MISSING)
    module = importlib.import_module(package + ".triton")
    if INTERPRET:
        return Impl("triton", getattr(module, function), ("cpu",), DTYPES)
    hint = "; set TRITON_INTERPRET=1 before the import to interpret it on the CPU"
    return Impl("triton", getattr(module, function), ("cuda",), DTYPES, hint=hint)


def _absent(*_: Any) -> Any:
    raise AssertionError("a missing backend was called")  # resolve() never hands it out
