"""Launches Triton kernels without Triton's own launch path, which takes 15 to 40 µs of host time per launch.

At each call, `kernel[grid](...)` determines what the kernel is specialised on (dtypes, None, which numbers are 1 or
multiples of 16, which pointers are aligned), looks up the compiled kernel by a text of all this, and calls it. Here
everything except the tensors is determined once. A launcher keeps a `Plan` for each combination of shapes, strides and
options; a plan keeps the compiled kernel for each kind of its tensors: dtype, on a CPU or not, aligned to 16 bytes or
not. Triton itself distinguishes no more kinds. The first launch of each is made by Triton, which returns the kernel to
keep. So a kept kernel is only called with the numbers of its first launch, and with tensors for which Triton would
choose the same kernel. It gets their addresses, for which its launcher would otherwise ask each tensor and then the
driver.

Only this file relies on undocumented behaviour of Triton. With untested versions all kernels are launched by
`kernel[grid](...)`. The same applies in the interpreter, while hooks are installed (a profiler's), and while
`JITFunction.run` is replaced. Triton reads its environment variables, and checks that the globals of a kernel are
constant, at the first launch of a specialisation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from foundry_kernels.core.extension import triton_call

#: Tested releases of Triton, whose `JITFunction.run` does what `launch` replaces.
KNOWN = ("3.6.", "3.7.", "3.8.", "3.9.")

try:
    import triton
    from triton import knobs
    from triton.compiler import CompiledKernel
    from triton.runtime.driver import driver as _drivers
    from triton.runtime.jit import JITFunction

    # This module is imported late: by then somebody may have replaced `run`.
    DIRECT = triton.__version__.startswith(KNOWN) and JITFunction.run.__module__ == JITFunction.__module__
except ImportError:  # no Triton, or its modules are elsewhere
    DIRECT = False

if DIRECT:
    from triton._C.libtriton import native_specialize_impl as _specialize

    _RUN = JITFunction.run
    _ENTER, _EXIT = type(knobs.runtime).__dict__["launch_enter_hook"], type(knobs.runtime).__dict__["launch_exit_hook"]
    _RUNTIME, _COMPILATION = knobs.runtime.__dict__, knobs.compilation.__dict__  # what a program has set

#: Settings that `JITFunction.run` looks at; those of compilation end in options of the kernel.
_LOOKED_AT = frozenset({"launch_enter_hook", "launch_exit_hook", "debug", "add_stages_inspection_hook"})
_COMPILED_INTO = frozenset({"instrumentation_mode", "fpsan_homomorphic_casts"})

#: Options that a launch may set besides the kernel's arguments.
_OPTIONS = frozenset({"num_warps", "num_stages", "maxnreg"})


class Plan:
    """A launch without its tensors: the grid, the numbers that follow the tensors, and the remaining arguments by name:
    numbers, constants, options."""

    __slots__ = ("constants", "grid", "kept", "numbers")

    def __init__(self, grid: tuple[int, ...], numbers: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.grid, self.numbers, self.constants = grid, numbers, constants
        self.kept: dict[Any, tuple[Any, ...]] = {}


def launch(kernel: Any, plan: Plan, *tensors: Any) -> None:
    """``kernel[plan.grid](*tensors, *plan.numbers, **plan.constants)``; a tensor may be None, or a tuple of tensors."""
    if not (DIRECT and type(kernel) is JITFunction and _undisturbed(kernel)):
        # The interpreter ignores arguments that a kernel does not have; a compiled kernel refuses them.
        if unknown := plan.constants.keys() - _OPTIONS - set(getattr(kernel, "arg_names", plan.constants)):
            raise TypeError(f"{kernel.__name__} has no {', '.join(sorted(unknown))}")
        kernel[plan.grid](*tensors, *plan.numbers, **plan.constants, **compiler_options())
        return
    driver = _drivers.active
    device = driver.get_current_device()
    kinds, pointers = _pointers(tensors) or _pointers_in_python(kernel, device, tensors)
    key = (kernel.__name__, device, kinds)
    kept = plan.kept.get(key)
    if kept is None or kept[0] is not kernel:
        try:
            compiled = kernel[plan.grid](*tensors, *plan.numbers, **plan.constants, **compiler_options())
        except OSError as error:  # of the folder in which Triton keeps what it compiles
            error.add_note("If Triton cannot write to its cache, set TRITON_CACHE_DIR to a folder that can be written.")
            raise
        if type(compiled) is CompiledKernel and compiled.metadata.target.backend == "cuda":
            plan.kept[key] = (kernel, compiled.run, compiled, *_rest(kernel, plan, len(tensors)))
        return
    _, run, compiled, x, y, z, rest = kept
    # No hooks, so no metadata for them.
    run(
        x, y, z, driver.get_current_stream(device), compiled.function, compiled.packed_metadata, None, None, None,
        *pointers, *rest,
    )  # fmt: skip


#: The key of a launch, and what replaces its tensors; None if an argument is neither a tensor nor None.
Pointers = tuple[Any, tuple[Any, ...]]


def _pointers_in_python(kernel: Any, device: int, tensors: tuple[Any, ...]) -> Pointers:
    """The Python version of the extension's `pointers`. Its key has another form, and it accepts all tensors."""
    kinds: list[Any] = []
    taken: list[Any] = []
    for x in tensors:
        if isinstance(x, tuple):
            for many, one in zip((kinds, taken), _pointers_in_python(kernel, device, x), strict=True):
                many.append(one)
        elif isinstance(x, Tensor):
            address = x.data_ptr()
            kinds += (x.dtype, address % 16 == 0, x.is_cpu)
            taken.append(x if x.is_cpu else address)  # Triton's launcher refuses a tensor on a CPU
        else:
            kinds.append(None if x is None else _specialize(kernel.device_caches[device][3], x, False, True, True))
            taken.append(x)
    return tuple(kinds), tuple(taken)


def _no_pointers(tensors: tuple[Any, ...]) -> Pointers | None:
    return None


_pointers: Callable[[tuple[Any, ...]], Pointers | None] = triton_call("pointers") or _no_pointers


def compiler_options() -> dict[str, bool]:
    """The options of every kernel: fused multiply-adds, which Triton 3.10 only uses on request (3.9 warns of this
    change). Triton's own environment variable or setting takes precedence."""
    settings = knobs.language
    chosen = "TRITON_DEFAULT_FP_FUSION" in os.environ or "default_fp_fusion" in settings.__dict__
    return {"enable_fp_fusion": settings.default_fp_fusion if chosen else True}


def _undisturbed(kernel: Any) -> bool:
    """Whether no hook observes the launch and no setting changes the compilation."""
    return (
        not _ENTER.calls
        and not _EXIT.calls
        and _LOOKED_AT.isdisjoint(_RUNTIME)
        and _COMPILED_INTO.isdisjoint(_COMPILATION)
        and not kernel.pre_run_hooks
        and JITFunction.run is _RUN
    )


def _rest(kernel: Any, plan: Plan, n_tensors: int) -> tuple[int, int, int, tuple[Any, ...]]:
    """The grid in three dimensions, and the kernel's arguments after the tensors, constants among them, in order."""
    x, y, z = (*plan.grid, 1, 1)[:3]
    names = kernel.arg_names[n_tensors + len(plan.numbers) :]
    return x, y, z, (*plan.numbers, *(plan.constants[name] for name in names))
