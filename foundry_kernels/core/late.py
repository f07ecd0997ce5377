"""Late imports: names of a package, modules of a higher layer, and actions after another module is imported."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
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
    """Returns a module of a higher layer, which the calling folder cannot import itself."""
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


class _Import(importlib.abc.MetaPathFinder):
    """An import hook that calls `then` after the first import of a module."""

    def __init__(self, module: str, then: Callable[[], None]) -> None:
        self.module, self.then = module, then

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self.then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def when_imported(module: str, then: Callable[[], None]) -> None:
    """Calls `then` once `module` is imported; immediately if it is imported already."""
    if module in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Import(module, then))
