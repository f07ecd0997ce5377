"""Classes whose code is that of a class with a row: they get that row's adapter.

Compared are the forward and every function, method and global that it reaches, instruction by instruction. Names of
local variables, docstrings, annotations and lines are ignored. What is no function must be the same object, or an equal
constant. So a class that differs in one statement, or in one of a function that it calls, is another one.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import inspect
import logging
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters.attention import Attention
from foundry_kernels.integrations.adapters.base import Adapter, names_of
from foundry_kernels.integrations.adapters.linear_attention import LinearAttention

#: The adapters that read nothing of a module but what its forward does too.
BY_FORWARD = (Attention, LinearAttention)
#: Constants, which may be equal objects.
PLAIN = (int, float, bool, str, bytes, type(None))
#: Instructions whose argument is a local variable: these are compared by their place.
LOCAL = ("LOAD_FAST", "STORE_FAST", "DELETE_FAST")
#: Of a code's flags, that it has a docstring.
DOCSTRING = 0x4000000

_TWINS: dict[tuple[type, Any], Adapter | None] = {}


def twin_of(cls: Any, rows: Mapping[tuple[str, str], Adapter]) -> Adapter | None:
    """Returns the adapter of the row whose class has the code of `cls`, or None."""
    key = cls, getattr(cls, "forward", None)
    if key not in _TWINS:
        twins = (
            adapter for twin, adapter in _candidates(cls, rows) if _Comparison(cls, twin).values(key[1], twin.forward)
        )
        _TWINS[key] = next(twins, None)
    return _TWINS[key]


def _candidates(cls: Any, rows: Mapping[tuple[str, str], Adapter]) -> Iterator[tuple[Any, Adapter]]:
    """The classes with rows that `cls` may be like by the names that it uses; no other's code is imported."""
    forward = inspect.unwrap(getattr(cls, "forward", nn.Module.forward))
    if not isinstance(forward, FunctionType) or cls.__module__.startswith("torch."):
        return
    taken, used = inspect.signature(forward).parameters.keys(), names_of(forward.__code__)
    for (home, name), adapter in rows.items():
        if not isinstance(adapter, BY_FORWARD) or not home.startswith("transformers."):
            continue
        if adapter.method == "forward" and taken <= adapter.arguments and used <= adapter.known():
            try:
                twin = getattr(importlib.import_module(home), name)
            except (ImportError, AttributeError):  # a release without this family
                continue
            if twin.__qualname__ == name and not adapter.why_changed(twin):
                yield twin, adapter


class _Comparison:
    """A comparison of two classes' code. Functions that are being compared already count as equal."""

    def __init__(self, first: type, second: type) -> None:
        self.classes = first, second
        self.compared: set[tuple[int, int]] = set()

    def values(self, a: Any, b: Any) -> bool:
        """Whether two globals, attributes of the classes, cells or constants are the same."""
        if a is b or (a, b) == self.classes:
            return True
        if type(a) is not type(b):
            return False
        if isinstance(a, FunctionType):
            return self.functions(a, b)
        if isinstance(a, CodeType):
            return self.codes(a, b)
        if isinstance(a, (staticmethod, classmethod)):
            return self.values(a.__func__, b.__func__)
        if isinstance(a, property):
            return all(self.values(getattr(a, part), getattr(b, part)) for part in ("fget", "fset", "fdel"))
        if isinstance(a, (tuple, list)):
            return len(a) == len(b) and all(map(self.values, a, b))
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(self.values(value, b[name]) for name, value in a.items())
        if isinstance(a, logging.Logger):
            return True
        return isinstance(a, PLAIN) and bool(a == b)

    def functions(self, a: FunctionType, b: FunctionType) -> bool:
        pair = id(a), id(b)
        if pair in self.compared:
            return True
        self.compared.add(pair)
        given = (a.__defaults__, a.__kwdefaults__), (b.__defaults__, b.__kwdefaults__)
        cells = [[cell.cell_contents for cell in f.__closure__ or ()] for f in (a, b)]
        if not (self.values(*given) and self.codes(a.__code__, b.__code__) and self.values(*cells)):
            return False
        return all(
            self.values(_global(a, name), _global(b, name)) for name in _names(a.__code__, "LOAD_GLOBAL", "LOAD_NAME")
        ) and all(self.values(*(_attribute(c, name) for c in self.classes)) for name in names_of(a.__code__))

    def codes(self, a: CodeType, b: CodeType) -> bool:
        taken = a.co_argcount + a.co_kwonlyargcount + bool(a.co_flags & inspect.CO_VARARGS)
        taken += bool(a.co_flags & inspect.CO_VARKEYWORDS)
        if (
            a.co_varnames[:taken] != b.co_varnames[:taken]
            or (a.co_argcount, a.co_posonlyargcount) != (b.co_argcount, b.co_posonlyargcount)
            or a.co_flags & ~DOCSTRING != b.co_flags & ~DOCSTRING
            or a.co_freevars != b.co_freevars
        ):
            return False
        first, second = [*dis.get_instructions(a)], [*dis.get_instructions(b)]
        return len(first) == len(second) and all(map(self.instructions, first, second))

    def instructions(self, a: dis.Instruction, b: dis.Instruction) -> bool:
        if a.opname != b.opname:
            return False
        if a.opname.startswith(LOCAL) or a.opcode in dis.hasjrel or a.opcode in dis.hasjabs:
            return a.arg == b.arg
        return a.opname == "EXTENDED_ARG" or self.values(a.argval, b.argval)


def _names(code: CodeType, *instructions: str) -> set[str]:
    """The arguments of these instructions in a function, including its inner functions."""
    found = {each.argval for each in dis.get_instructions(code) if each.opname in instructions}
    return found.union(*(_names(part, *instructions) for part in code.co_consts if isinstance(part, CodeType)))


#: In place of what does not exist.
NOTHING = object()


def _global(function: FunctionType, name: str) -> Any:
    return function.__globals__.get(name, getattr(builtins, name, NOTHING))


def _attribute(cls: type, name: str) -> Any:
    """What a class has of this name, and not by being a module."""
    found = inspect.getattr_static(cls, name, NOTHING)
    return NOTHING if found is inspect.getattr_static(nn.Module, name, NOTHING) else found
