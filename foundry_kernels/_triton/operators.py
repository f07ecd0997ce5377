"""Operators of Triton kernels: their registration, and the direct path to their launchers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.compiler import is_compiling

from foundry_kernels._triton import INTERPRET, load
from foundry_kernels.core import autograd
from foundry_kernels.core.extension import triton_call
from foundry_kernels.core.options import Options


def requires_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether a call with these tensors must be recorded for a backward pass."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a launcher so that the device of its tensors is the current device. Triton launches on the current device,
    whatever its arguments are, and an operator defined in Python has no device guard."""

    @wraps(kernel)
    def launcher(*args: Any) -> Any:
        first = args[0]  # of most operators; where it may be None, another tensor
        device = first.device if first is not None else next(x.device for x in args if isinstance(x, torch.Tensor))
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            return kernel(*args)
        with torch.cuda.device(device):
            return kernel(*args)

    return launcher


_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")
LAUNCHERS: dict[str, Callable[..., Any]] = {}  # by the operator's name
_ON_CPU: set[str] = set()


def define(
    schema: str, launcher: Callable[..., Any], fake: Callable[..., Any], *options: type[Options]
) -> Callable[..., Any]:
    """Registers `foundry_kernels::<schema>` with a launcher and a fake, and returns the function to call.

    Kernels are launched by operators so that torch.compile does not trace into the launch, and so that selective
    checkpointing, DTensor and profilers know them by name. If the dispatcher would only call the launcher (no mode is
    active, and tensors are plain: no subclass, no lazy negation, no wrapper), the launcher is called directly, which
    takes less host time. `launcher` and `fake` return None for a result that is not requested; the operator, whose
    results are all tensors, returns an empty tensor. `fake` takes those of the launcher's arguments that it names, or
    all of them if it has ``*args``.

    The operator takes the fields of `options`, classes whose `SCHEMA` is in the schema, one by one; the launcher, the
    fake and the returned function take one object for each class.
    """
    name = schema.split("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.foundry_kernels, name).default
    types = {a.name: str(a.type) for a in operator._schema.arguments}
    inner = {field for kind in options for field in kind._fields[1:]}
    by_first_field = {kind._fields[0]: kind for kind in options}
    taken = [argument for argument in types if argument not in inner]
    layout = [by_first_field.get(argument) for argument in taken]
    LAUNCHERS[name] = _filled(_with_objects(on_its_device(launcher), layout))
    _LIBRARY.impl(name, LAUNCHERS[name], "CPU" if INTERPRET else "CUDA")
    if INTERPRET:
        _ON_CPU.add(name)
    torch.library.register_fake(
        f"foundry_kernels::{name}", _filled(_with_objects(_by_name(fake, launcher), layout)), lib=_LIBRARY
    )
    tensors: list[tuple[int, int | None]] = []  # (argument, its field if it is an object)
    for i, kind in enumerate(layout):
        if kind is not None:
            tensors += [(i, at) for at in (*kind._tensors_at, *kind._lists_at)]
        elif "Tensor" in types[taken[i]]:
            tensors.append((i, None))

    def flat(args: tuple[Any, ...]) -> list[Any]:
        return [x for i, arg in enumerate(args) for x in (arg.operator_args() if layout[i] else (arg,))]

    usual_device = _usual_device or _asked_by_position(tensors)

    def call(*args: Any) -> Any:
        if is_compiling() or _transform() is not None or (device := usual_device(args)) is None:
            return operator(*flat(args))
        if device < 0 or device == torch.cuda.current_device():
            return launcher(*args)
        with torch.cuda.device(device):
            return launcher(*args)

    return call


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)`` without PyTorch's Python code for transforms, which takes 1 µs, if no transform is
    involved."""
    if is_compiling() or _usual_device is None or _transform() is not None or _usual_device(args) is None:
        return autograd.apply(function, *args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def _asked_by_position(tensors: list[tuple[int, int | None]]) -> Callable[[tuple[Any, ...]], int | None]:
    """The Python version of the extension's `usual_device`, for an operator with tensors at these positions among its
    arguments."""

    def usual_device(args: tuple[Any, ...]) -> int | None:
        if _watched():
            return None
        first = None
        for i, at in tensors:
            given = args[i] if at is None else args[i][at]
            for x in given if type(given) is tuple else () if given is None else (given,):
                if type(x) not in _PLAIN_TYPES or _keys(x).raw_repr() & _FOREIGN:
                    return None
                first = x if first is None else first
        return None if first is None else -1 if first.is_cpu else first.get_device()

    return usual_device


def _by_name(fake: Callable[..., Any], launcher: Callable[..., Any]) -> Callable[..., Any]:
    """`fake` as a function of the launcher's arguments."""
    parameters, names = inspect.signature(fake).parameters, list(inspect.signature(launcher).parameters)
    if any(p.kind == p.VAR_POSITIONAL for p in parameters.values()):
        return fake
    return lambda *args: fake(**{name: x for name, x in zip(names, args, strict=False) if name in parameters})


def _with_objects(function: Callable[..., Any], layout: list[type[Options] | None]) -> Callable[..., Any]:
    """A function of the operator's arguments. It collects the fields of each class in `layout` into an object."""
    if not any(layout):
        return function

    @wraps(function)
    def of_arguments(*args: Any) -> Any:
        given: list[Any] = []
        for kind in layout:
            if kind is not None:
                made, args = kind.from_operator_args(args)
                given.append(made)
            elif args:  # the dispatcher omits trailing arguments that have their defaults
                given.append(args[0])
                args = args[1:]
        return function(*given)

    return of_arguments


def _filled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with empty tensors in place of results that are None."""

    @wraps(function)
    def filled(*args: Any) -> Any:
        results = function(*args)
        if not isinstance(results, tuple):
            return results
        like = next(x for x in args if isinstance(x, torch.Tensor))
        return tuple(like.new_empty(0) if r is None else r for r in results)

    return filled


def _plain_keys() -> int:
    """The bits of the dispatch keys that plain tensors have."""
    key, bits = torch._C.DispatchKey, 0
    for each in ("CPU", "CUDA"):
        for kind in ("", "Autograd", "Autocast"):
            bits |= torch._C.DispatchKeySet(getattr(key, kind + each)).raw_repr()
    return bits | torch._C.DispatchKeySet(key.ADInplaceOrView).raw_repr()


_FOREIGN = ~_plain_keys()
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


_keys = torch._C._dispatch_keys

#: The innermost transform of torch.func that is active, or None.
_transform = torch._C._functorch.peek_interpreter_stack

#: The device index of a call's tensors, -1 for the CPU, or None if the dispatcher must see the call: a tensor is not
#: plain, or `_watched`. A function of the extension (csrc/triton_calls.cpp).
_usual_device: Callable[[tuple[Any, ...]], int | None] | None = triton_call("usual_device")


def _watched() -> bool:
    """Whether a mode, a profiler or a tracer is active, for which the dispatcher is needed."""
    c = torch._C
    return bool(
        c._len_torch_dispatch_stack()
        or c._len_torch_function_stack()
        or c._autograd._profiler_enabled()
        or c._is_tracing()
    )


def serve_cpu_tensors() -> None:
    """Registers the launchers for CPU tensors too, so that `tools.inspect` can record their launches."""
    load()
    for name, launcher in LAUNCHERS.items():
        if name not in _ON_CPU:
            _ON_CPU.add(name)
            _LIBRARY.impl(name, launcher, "CPU")
