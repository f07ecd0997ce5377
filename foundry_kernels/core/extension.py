"""Loads the compiled extension once, or stores the reason why it cannot be used.

Importing `foundry_kernels._C` registers the operators `torch.ops.foundry_kernels.*` of `csrc/torch/`.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from foundry_kernels.core import bfloat16
from foundry_kernels.core.registry import Impl, no_direct_call

#: How to build an extension for this torch and this machine.
REBUILD = "run `pip install --no-build-isolation -e .` with a C++ compiler"


def _load() -> tuple[Any, str | None]:
    try:
        module = importlib.import_module("foundry_kernels._C")
    except ModuleNotFoundError:
        return None, f"the C++ extension is not built; {REBUILD}"
    except ImportError as error:  # built for another torch or processor, or a library is missing
        return (
            None,
            f"the C++ extension does not load ({error}); for torch {torch.__version__} and this machine {REBUILD}",
        )
    return module, None


_C, MISSING = _load()


def _choose_bfloat16() -> bfloat16.Choice | None:
    if not hasattr(_C, "choose_bfloat16"):  # there is no extension, or an older one
        return None
    usable = tuple(_C.build_info()["usable_instruction_sets"])
    choice = bfloat16.choose(bfloat16.Processor(**_C.processor()), usable, os.environ, _C.measure_bfloat16)
    _C.choose_bfloat16(choice.tiles, choice.pairs, choice.products)
    return choice


#: How bfloat16 matmuls are computed on the CPU.
BFLOAT16 = _choose_bfloat16()

#: Hints: the operation has kernels for one device only; the extension was compiled without CUDA.
CPU_ONLY = "; it has no CUDA kernels"
CUDA_ONLY = "; it has no CPU kernels"
NO_CUDA = (
    "; this extension was compiled without CUDA{because} (rebuild it with a CUDA build of torch, and nvcc on the PATH "
    "or in CUDA_HOME)"
)


def operator(name: str) -> Any:
    """The extension's operator `name`; None where the extension is not built, or older than this package."""
    found = getattr(torch.ops.foundry_kernels, name, None) if MISSING is None else None
    return None if found is None else found.default


def triton_call(name: str) -> Any:
    """The extension's function `name` of csrc/triton_calls.cpp; None where the extension is not built, or older than
    this package."""
    return getattr(getattr(_C, "triton", None), name, None)


def set_single_chunk(multiplications: int, tokens: int) -> None:
    """Tells the direct call of linear_cross_entropy its limits; without them it takes no call. An extension older than
    this package has limits of its own."""
    if hasattr(_C, "set_single_chunk"):
        _C.set_single_chunk(multiplications, tokens)


def build_info() -> dict[str, Any]:
    """The extension's compiler, the torch that it was built for, its instruction sets and CUDA architectures, and
    whether `csrc/cuda/hopper` is compiled in."""
    return {} if _C is None else dict(_C.build_info())


#: Whether attention's kernels for compute capability 9.0 (csrc/cuda/hopper) are compiled in.
HAS_HOPPER = bool(build_info().get("hopper"))


def impl(package: str, function: str, devices: tuple[str, ...] = ("cpu", "cuda")) -> Impl:
    """The native backend of an operation: `function` of its `native` module, or the reason why there is none.

    `devices` are those that csrc has kernels for; "cuda" is supported if the extension was compiled with CUDA.
    """
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    if MISSING is not None:
        return Impl("native", _absent, dtypes=dtypes, missing=MISSING, sources=devices)
    try:
        module = importlib.import_module(package + ".native")
    except AttributeError as error:  # sources newer than the extension: it has no such operator yet
        stale = f"the C++ extension is older than this package ({error}); {REBUILD}"
        return Impl("native", _absent, dtypes=dtypes, missing=stale, sources=devices)
    compiled = tuple(d for d in devices if d != "cuda" or build_info()["cuda_architectures"])
    hint = CPU_ONLY if "cuda" not in devices else CUDA_ONLY if "cpu" not in devices else ""
    if compiled != devices:
        reason = build_info().get("without_cuda")  # extensions from before do not say
        hint += NO_CUDA.format(because=f", because {reason}" if reason else "")
    native = Impl("native", getattr(module, function), compiled, dtypes, hint=hint, sources=devices)
    if (direct := getattr(_C.direct, function, None)) is None:
        return native
    serve = getattr(_C, "serve_on_accelerator", None)  # an older extension calls directly on the CPU alone
    return replace(native, direct=direct, set_served=no_direct_call if serve is None else partial(serve, function))


def _absent(*_: Any) -> Any:
    raise AssertionError("a missing backend was called")  # resolve() never hands it out
