"""Modules whose methods call a rotation function of their file: the methods stay, and call `rope` in its place.

Such a method is made again from its own code, in which one global name is another: that of a function which is put
beside the original one in the file. The file's functions themselves stay as they are, for models that are not patched.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import CellType, CodeType, FunctionType
from typing import Any

from torch import nn

from foundry_kernels.core.registry import BACKENDS
from foundry_kernels.integrations.adapters.base import Adapter
from foundry_kernels.integrations.recognise.rotations import Rotation, own_bases, rotation_of
from foundry_kernels.integrations.recognise.tables import Tables

#: A rotation function that a class calls: its file, its name there, and what it computes.
Called = tuple[str, str, Rotation]


@dataclass(frozen=True)
class Rotating(Adapter):
    """A class whose methods call rotation functions that are recognised.

    stays: why one of them, or its attention, was left; "" if nothing was.
    """

    rotations: tuple[Called, ...] = ()
    stays: str = ""

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return ("rope",) if self.rotations else ()

    def members(self, original: type) -> dict[str, Any]:
        return rotating_members(original, self.rotations)

    def unrecognised(self) -> Rotating | None:
        """Returns the adapter that replaces no rotation; None where nothing else would be replaced."""
        return None if type(self) is Rotating else replace(self, rotations=(), stays="")

    def without_attention(self, reason: str) -> Rotating | str:
        """Returns the adapter of a module whose attention is left for this reason; the reason where nothing else is
        replaced."""
        return Rotating(rotations=self.rotations, stays=reason) if self.rotations else reason

    def settled(self, module: nn.Module, tables: Tables) -> Any:
        """Returns the adapter with those rotations alone whose tables are known to be what the rotation needs."""
        kept, reasons = [], [self.stays] if self.stays else []
        for home, name, rotation in self.rotations:
            unequal = rotation.needs and tables.why_unequal(module, home, name, rotation.needs)
            if unequal:
                reasons.append(f"its rotation stays: {unequal}")
            else:
                kept.append((home, name, rotation))
        stays = "; ".join(dict.fromkeys(reasons))
        if not kept and "flash_attention" not in self.ops(module):
            return stays
        return replace(self, rotations=tuple(kept), stays=stays)


@functools.cache
def rotations_of(cls: type) -> tuple[Called, ...]:
    """Returns the rotation functions that methods of a class of modules call."""
    found: dict[tuple[str, str], Rotation] = {}
    for _, function in _methods(cls):
        for name in _globals_of(function.__code__):
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and (rotation := rotation_of(called)) is not None:
                found[str(function.__globals__.get("__name__")), name] = rotation
    return tuple((*key, rotation) for key, rotation in found.items())


def unknown_rotation(cls: type) -> str | None:
    """Returns the name of a function of a class's file that seems to rotate, by its name, and is not recognised."""
    for _, function in _methods(cls):
        for name in sorted(_globals_of(function.__code__)):
            rotates = "rotary" in name or (name.startswith("apply") and "rope" in name)
            called = function.__globals__.get(name)
            if rotates and callable(called) and not isinstance(called, type) and rotation_of(called) is None:
                return name
    return None


def _methods(cls: type) -> Iterator[tuple[str, Any]]:
    """The methods of a class that are its own or those of other classes of models, each without its decorators."""
    seen: set[str] = set()
    for base in own_bases(cls):
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and name not in seen:
                seen.add(name)
                plain = inspect.unwrap(value)
                if isinstance(plain, FunctionType):
                    yield name, plain


def _globals_of(code: CodeType) -> set[str]:
    """The names that a function takes from its file, and from nowhere else."""
    steps = list(dis.get_instructions(code))
    names = {s.argval for s in steps if s.opname == "LOAD_GLOBAL"}
    names -= {s.argval for s in steps if s.opname != "LOAD_GLOBAL" and s.argval in names and s.opcode in dis.hasname}
    for part in code.co_consts:
        if isinstance(part, CodeType):
            names |= _globals_of(part)
    return names


def rotating_members(original: type, rotations: tuple[Called, ...]) -> dict[str, Any]:
    """Returns the methods of a class that call one of `rotations`, made again."""
    names = {name for _, name, _ in rotations}
    members: dict[str, Any] = {}
    for method, plain in _methods(original):
        if names & _globals_of(plain.__code__):
            own = inspect.getattr_static(original, method)
            versions = {backend: _made_again(own, rotations, backend) for backend in ("auto", *BACKENDS)}
            if all(version is not None for version in versions.values()):
                members[method] = _by_backend(own, versions)
    return members


def _by_backend(original: Callable[..., Any], versions: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        backend = self._foundry.backends.get("rope")
        run = original if backend is None else versions[backend]
        return run(self, *args, **kwargs)

    return method


def _made_again(function: Any, rotations: tuple[Called, ...], backend: str) -> Any:
    """Returns a function that does the same but rotates by `rope`; with its decorators, or None if they cannot be made
    again."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        code = function.__code__
        for home, name, rotation in rotations:
            if function.__globals__.get("__name__") == home and name in _globals_of(code):
                code = _renamed(code, name, _put_beside(function.__globals__, name, rotation, backend))
        made, closure = code, function.__closure__
    else:
        made_inner = _made_again(inner, rotations, backend)
        cells = function.__closure__ or ()
        if made_inner is None or not any(cell.cell_contents is inner for cell in cells):
            return None
        made = function.__code__
        closure = tuple(CellType(made_inner) if cell.cell_contents is inner else cell for cell in cells)
    again = FunctionType(made, function.__globals__, function.__name__, function.__defaults__, closure)
    again.__kwdefaults__, again.__qualname__ = function.__kwdefaults__, function.__qualname__
    again.__dict__.update(function.__dict__)
    if inner is not None:
        again.__wrapped__ = made_inner  # type: ignore[attr-defined]
    return again


def _put_beside(home: dict[str, Any], name: str, rotation: Rotation, backend: str) -> str:
    """Returns the name in a file of the function that serves `rotation` on a backend in place of the one called
    `name`."""
    ours = f"_foundry_{name}_{backend}"
    known = home.get(ours)
    if known is None or known.__wrapped__ is not home[name]:
        made = rotation.serving(home[name], backend)
        made.__wrapped__ = home[name]  # type: ignore[attr-defined]
        home[ours] = made
    return ours


def _renamed(code: CodeType, name: str, ours: str) -> CodeType:
    parts = tuple(_renamed(part, name, ours) if isinstance(part, CodeType) else part for part in code.co_consts)
    names = tuple(ours if each == name else each for each in code.co_names)
    return code.replace(co_names=names, co_consts=parts)
