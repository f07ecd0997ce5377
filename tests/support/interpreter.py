"""Makes Triton's interpreter quicker, without a change of what it computes.

While a kernel runs, the interpreter replaces the functions of `triton.language`. It looks for them among all members at
each launch, and again at each call of a device function, where they are replaced already: that took most of its time.
"""

from __future__ import annotations

import os
from typing import Any


def hasten() -> None:
    """Replaces the interpreter's private functions, if it is in use and they are those of Triton 3.7 to 3.9."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    if not all(hasattr(interpreter, name) for name in ("_LangPatchScope", "_patch_builtin", "_patch_lang")):
        return
    tl, replace = interpreter.tl, interpreter._patch_lang
    #: The modules that are replaced while the running kernel runs.
    replaced: set[int] = set()
    builtins: dict[int, list[str]] = {}

    class Scope(interpreter._LangPatchScope):  # type: ignore[name-defined, misc]
        def restore(self) -> None:
            replaced.clear()
            super().restore()

    def patch_lang(fn: Any) -> Any:
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= replaced:
            return Scope()
        scope = Scope()
        scope._changes = replace(fn)._changes
        replaced.update(modules)
        return scope

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if id(package) not in builtins:
            members = interpreter.inspect.getmembers(package)
            builtins[id(package)] = [name for name, member in members if tl.core.is_builtin(member)]
        for name in builtins[id(package)]:
            if tl.core.is_builtin(member := getattr(package, name)):
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter._patch_lang, interpreter._patch_builtin = patch_lang, patch_builtin
