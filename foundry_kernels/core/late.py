"""Late imports: names of a package, modules of a higher layer, and actions after another module is imported."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ABOVE: dict[str, str] = {}


def provide(modules: Mapping[str, str]) -> None:
    """Registers the modules that `module_above` can return. The package calls this, because it knows all of its
    folders."""
    _ABOVE.update(modules)


def module_above(name: str) -> ModuleType:
    """Returns a module of a higher layer, which the calling file cannot import itself."""
    return importlib.import_module(_ABOVE[name])


def names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` for a package with names that are imported when they are first used.

    Args:
        modules: by the name, the module that has it, or that it is.
    """

    def find(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(modules[name])
        found = module if module.__name__ == f"{package}.{name}" else getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    def listed() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return find, listed


class _Waiting(importlib.abc.MetaPathFinder):
    """The import hook of `when_imported`: it lets the other finders find a module that is waited for, and gives it a
    loader that calls what waits. It is in `sys.meta_path` only while something waits."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Callable[[], None]]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next((found for each in others if (found := each.find_spec(name, path, target)) is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec

    def add(self, module: str, then: Callable[[], None]) -> None:
        self.actions.setdefault(module, []).append(then)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def run(self, module: str) -> None:
        for then in self.actions.pop(module, ()):
            then()
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    """Loads a module as `loader` does, to which it gives its place back, and then runs what waits for it."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _WAITING.run(module.__name__)


_WAITING = _Waiting()


def when_imported(module: str, then: Callable[[], None]) -> None:
    """Calls `then` once `module` is imported; immediately if it is imported already. The import of `module` fails if
    `then` raises."""
    if module in sys.modules:
        then()
    else:
        _WAITING.add(module, then)
