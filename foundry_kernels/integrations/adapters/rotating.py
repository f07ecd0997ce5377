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

    def for_family(self, module: nn.Module) -> Rotating:
        """Returns the adapter for a module of a family that may have masks of its own kind."""
        return self

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
    for _, function in methods_of(cls):
        for name in globals_of(function.__code__):
            called = function.__globals__.get(name)
            if isinstance(called, FunctionType) and (rotation := rotation_of(called)) is not None:
                found[str(function.__globals__.get("__name__")), name] = rotation
    return tuple((*key, rotation) for key, rotation in found.items())


def unknown_rotation(cls: type) -> str | None:
    """Returns the name of a function of a class's file that seems to rotate, by its name, and is not recognised."""
    for _, function in methods_of(cls):
        for name in sorted(globals_of(function.__code__)):
            rotates = "rotary" in name or (name.startswith("apply") and "rope" in name)
            called = function.__globals__.get(name)
            if rotates and callable(called) and not isinstance(called, type) and rotation_of(called) is None:
                return name
    return None


def methods_of(cls: type) -> Iterator[tuple[str, Any]]:
    """The methods of a class that are its own or those of other classes of models, each without its decorators."""
    seen: set[str] = set()
    for base in own_bases(cls):
        for name, value in vars(base).items():
            if isinstance(value, FunctionType) and name not in seen:
                seen.add(name)
                plain = inspect.unwrap(value)
                if isinstance(plain, FunctionType):
                    yield name, plain


def globals_of(code: CodeType) -> set[str]:
    """The names that a function takes from its file, and from nowhere else."""
    steps = list(dis.get_instructions(code))
    names = {s.argval for s in steps if s.opname == "LOAD_GLOBAL"}
    names -= {s.argval for s in steps if s.opname != "LOAD_GLOBAL" and s.argval in names and s.opcode in dis.hasname}
    for part in code.co_consts:
        if isinstance(part, CodeType):
            names |= globals_of(part)
    return names


#: What makes another code of a method: it gets that, and the globals of its file.
Change = Callable[[CodeType, dict[str, Any]], CodeType]


def rotating_members(original: type, rotations: tuple[Called, ...], *change: Any) -> dict[str, Any]:
    """Returns the methods of a class that call one of `rotations`, made again; and others as of `remade`."""
    return {method: by_backend(versions) for method, versions in remade(original, rotations, *change)}


def remade(
    original: type, rotations: tuple[Called, ...], change: Change | None = None, applies: Any = None
) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yields the methods of a class that call one of `rotations`, or to which a `change` applies, made again: for each
    backend that rotates, and for None, where the rotation stays."""
    names = {name for _, name, _ in rotations}
    for method, plain in methods_of(original):
        rotates = not names.isdisjoint(globals_of(plain.__code__))
        more = (change,) if change is not None and applies(plain) else ()
        if not rotates and not more:
            continue
        own = inspect.getattr_static(original, method)
        versions: dict[Any, Any] = {None: made_again(own, *more) if more else own}
        for backend in ("auto", *BACKENDS) if rotates else ():
            versions[backend] = made_again(own, *more, functools.partial(_rotating, rotations, backend))
        if all(version is not None for version in versions.values()):
            yield method, versions


def by_backend(versions: dict[Any, Any]) -> Callable[..., Any]:
    @functools.wraps(versions[None])
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = versions.get(self._foundry.backends.get("rope"), versions[None])
        return run(self, *args, **kwargs)

    return method


def _rotating(rotations: tuple[Called, ...], backend: str, code: CodeType, home: dict[str, Any]) -> CodeType:
    """Returns the code that rotates by `rope`."""
    for where, name, rotation in rotations:
        if home.get("__name__") == where and name in globals_of(code):
            code = renamed(code, name, _put_beside(home, name, rotation, backend))
    return code


def made_again(function: Any, *changes: Change) -> Any:
    """Returns a function with another code, with its decorators; None if they cannot be made again."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        made, closure = function.__code__, function.__closure__
        for change in changes:
            made = change(made, function.__globals__)
    else:
        made_inner = made_again(inner, *changes)
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


def renamed(code: CodeType, name: str, ours: str) -> CodeType:
    parts = tuple(renamed(part, name, ours) if isinstance(part, CodeType) else part for part in code.co_consts)
    names = tuple(ours if each == name else each for each in code.co_names)
    return code.replace(co_names=names, co_consts=parts)
