"""Which code a module's forward reaches, and whether all of it is in the vocabulary.

The code is followed as it would run on this module: its bytecode, because a class may have no source. What a condition
of constants excludes is not looked at. No instruction is executed, so that nothing of the module's can change.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.recognise.words import (
    BUILTINS,
    WORDS,
    is_activations,
    is_constant,
    is_library,
    is_theirs,
)


class LeftError(Exception):
    """A module is none of the forms; the message says why."""


@dataclass(frozen=True)
class Known:
    """A constant, a function or a module of Python."""

    value: Any


@dataclass(frozen=True)
class Part:
    """The module itself, a module in it, or a parameter."""

    path: tuple[str, ...]
    value: Any


#: What is not known, but is no value or size of a tensor either: a dtype, whether it trains, whether something is None.
FIXED = object()
#: Any other value.
ANY = object()
#: A call of `super`.
SUPER = object()


class Reached:
    """The code that a module's forward reaches.

    Attributes:
        read: what it reads of the module: the path of attributes, and the value.
        functions: the functions of Python that it runs.
        names: the globals and cells that it reads, as a function that looks each up again, and the value.
        left: why it is none of the forms, as far as the code tells; the others are then what was read until there.
    """

    def __init__(self, module: nn.Module) -> None:
        self.read: dict[tuple[str, ...], Any] = {}
        self.functions: list[FunctionType] = []
        self.names: list[tuple[Callable[[], Any], Any]] = []
        self._seen: set[tuple[Any, tuple[str, ...]]] = set()
        self.left: str | None = None
        try:
            self.call(module, ())
        except LeftError as error:
            self.left = str(error)

    def call(self, module: nn.Module, path: tuple[str, ...]) -> None:
        """Follows the forward of a module."""
        self.run(type(module).forward, module, path)

    def run(self, function: Any, owner: nn.Module | None, path: tuple[str, ...]) -> None:
        if not isinstance(function, FunctionType):
            raise LeftError("its forward is not Python")
        if (function.__code__, path) in self._seen:
            return
        self._seen.add((function.__code__, path))
        if function not in self.functions:
            self.functions.append(function)
        if len(self.functions) > 40:
            raise LeftError("its forward reaches more functions than any form has")
        _Run(self, function, owner, path).follow()

    def constants(self) -> list[float]:
        """The numbers in the code and in the defaults of its functions."""
        found = [c for f in self.functions for c in (*_constants(f.__code__), *(f.__defaults__ or ()))]
        return list(dict.fromkeys(c for c in found if isinstance(c, float)))


def _constants(code: CodeType) -> list[Any]:
    return list(code.co_consts)


#: What is said of an instruction that no form has.
REASONS = {
    "STORE_ATTR": "writes to an attribute", "DELETE_ATTR": "deletes an attribute", "STORE_GLOBAL": "writes to a global",
    "STORE_DEREF": "writes to a variable of another function", "STORE_SUBSCR": "writes into an object",
    "STORE_SLICE": "writes into an object", "FOR_ITER": "has a loop", "GET_ITER": "has a loop",
    "JUMP_BACKWARD": "has a loop", "IMPORT_NAME": "imports something", "BEFORE_WITH": "has a with block",
    "MAKE_FUNCTION": "defines a function", "RAISE_VARARGS": "raises an error", "LOAD_SPECIAL": "has a with block",
}  # fmt: skip
#: Instructions that do nothing to the stack that matters here.
NOTHING = ("RESUME", "CACHE", "NOP", "PRECALL", "KW_NAMES", "COPY_FREE_VARS", "MAKE_CELL", "EXTENDED_ARG", "TO_BOOL",
           "NOT_TAKEN")  # fmt: skip
#: Instructions that make a value of those on the stack.
VALUES = ("BINARY_", "UNARY_", "BUILD_", "CALL", "UNPACK_", "LIST_", "DICT_", "PUSH_NULL", "END_", "FORMAT_")
COMPARE = {"<": operator.lt, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt,
           ">=": operator.ge}  # fmt: skip


class _Run:
    """One function, followed along every path that the module may take."""

    def __init__(self, reached: Reached, function: FunctionType, owner: nn.Module | None, path: tuple[str, ...]):
        self.reached, self.function, self.owner, self.path = reached, function, owner, path
        code = function.__code__
        self.instructions = list(dis.get_instructions(code))
        self.at = {each.offset: i for i, each in enumerate(self.instructions)}
        self.cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        first = code.co_varnames[0] if owner is not None and code.co_argcount else None
        self.begin: dict[str, Any] = {} if first is None else {first: Part(path, owner)}

    def follow(self) -> None:
        waiting: list[tuple[int, list[Any], dict[str, Any]]] = [(0, [], self.begin)]
        done: set[int] = set()
        while waiting:
            i, stack, names = waiting.pop()
            if i not in done:
                done.add(i)
                goes_on = self.step(self.instructions[i], stack, names)
                waiting += [(i + 1 if to is None else self.at[to], list(stack), dict(names)) for to in goes_on]

    def step(self, now: Any, stack: list[Any], names: dict[str, Any]) -> tuple[int | None, ...]:
        """Does one instruction. Returns where it may go on: offsets, None for the next instruction."""
        op, value = now.opname, now.argval
        if op in REASONS:
            what = f" {value}" if op in ("STORE_ATTR", "STORE_GLOBAL", "IMPORT_NAME") else ""
            raise LeftError(f"its {self.function.__name__} {REASONS[op]}{what}")
        if op in NOTHING:
            return (None,)
        if op.startswith("RETURN"):
            return ()
        if "JUMP" in op:
            return self.jump(op, value, stack)
        if op.startswith(("LOAD_FAST", "STORE_FAST")):
            self.variables(op, value, stack, names)
        elif op in ("LOAD_CONST", "LOAD_SMALL_INT"):
            stack.append(Known(value))
        elif op == "LOAD_GLOBAL":
            stack += self.null(now) * [ANY] + [self.named(value)]
        elif op in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
            stack.append(self.cell(value, names))
        elif op == "LOAD_SUPER_ATTR":
            del stack[-3:]
            stack += self.null(now) * [ANY] + [self.above(value)]
        elif op in ("LOAD_ATTR", "LOAD_METHOD"):
            found = self.attribute(stack.pop(), value)
            stack += (op == "LOAD_METHOD" or self.null(now)) * [ANY] + [found]
        elif op == "COPY":
            stack.append(stack[-now.arg])
        elif op == "SWAP":
            stack[-1], stack[-now.arg] = stack[-now.arg], stack[-1]
        elif op == "POP_TOP":
            stack.pop()
        elif op in ("COMPARE_OP", "IS_OP", "CONTAINS_OP"):
            right, left = stack.pop(), stack.pop()
            stack.append(self.compared(now, left, right))
        elif op.startswith(VALUES):
            self.value(now, stack)
        else:
            raise LeftError(f"its {self.function.__name__} has an instruction ({op}) that no form has")
        return (None,)

    def null(self, now: Any) -> bool:
        """Returns whether an instruction leaves one value more, which a call takes."""
        return bool(dis.stack_effect(now.opcode, now.arg, jump=False) > (0 if now.opname == "LOAD_ATTR" else 1)) or (
            now.opname == "LOAD_SUPER_ATTR" and bool(now.arg & 1)
        )

    def jump(self, op: str, target: int, stack: list[Any]) -> tuple[int | None, ...]:
        if "IF" not in op:
            return (target,)
        condition = stack[-1] if op.startswith("JUMP_IF") else stack.pop()
        if "NONE" in op:
            verdict = condition.value is None if isinstance(condition, (Known, Part)) else None
            if verdict is not None:
                taken = verdict != ("NOT" in op)
                return (target,) if taken else (None,)
            return (None, target)
        if isinstance(condition, Known):
            taken = bool(condition.value) == ("TRUE" in op)
            if op.startswith("JUMP_IF") and not taken:
                stack.pop()
            return (target,) if taken else (None,)
        if condition is not FIXED:
            raise LeftError(f"its {self.function.__name__} chooses by the values or sizes of its input")
        if op.startswith("JUMP_IF"):
            raise LeftError(f"its {self.function.__name__} chooses in a way that no form has")
        return (None, target)

    def variables(self, op: str, value: Any, stack: list[Any], names: dict[str, Any]) -> None:
        each = (value,) if isinstance(value, str) else tuple(value)
        kinds = [part for part in op.split("_") if part in ("LOAD", "STORE")]
        for kind, name in zip(kinds, each, strict=True):
            if kind == "STORE":
                names[name] = stack.pop()
            else:
                stack.append(names.get(name, ANY))

    def named(self, name: str) -> Any:
        where = self.function.__globals__
        if name in where:
            value = where[name]
            self.reached.names.append((lambda: where.get(name), value))
            if is_constant(value) and not isinstance(value, torch.dtype):
                raise LeftError(f"its {self.function.__name__} reads the global {name}, which may change")
        elif hasattr(builtins, name):
            value = getattr(builtins, name)
            if value not in BUILTINS:
                raise LeftError(f"its {self.function.__name__} uses {name}")
        else:
            raise LeftError(f"its {self.function.__name__} uses {name}, which does not exist")
        return SUPER if value is super else self.thing(name, value)

    def cell(self, name: str, names: dict[str, Any]) -> Any:
        if name == "__class__" or name not in self.cells:
            return names.get(name, ANY)
        cell = self.cells[name]
        value = cell.cell_contents
        self.reached.names.append((lambda: cell.cell_contents, value))
        return Known(value) if is_constant(value) else self.thing(name, value)

    def above(self, name: str) -> Any:
        """What `super` gives of this name."""
        cell = self.cells.get("__class__")
        if cell is None or self.owner is None:
            raise LeftError(f"its {self.function.__name__} uses super")
        found = getattr(super(cell.cell_contents, self.owner), name, None)
        if not isinstance(found, MethodType):
            raise LeftError(f"its {self.function.__name__} uses super().{name}")
        self.reached.run(found.__func__, self.owner, self.path)
        return ANY

    def thing(self, name: str, value: Any) -> Any:
        """A function, a module of Python, a class that is not reached through the module."""
        if is_library(value) or is_constant(value) or value is Tensor or value in (float, int, tuple):
            return Known(value)
        if is_activations(value):
            return ANY
        if isinstance(value, (FunctionType, BuiltinFunctionType)) or callable(value):
            if value in BUILTINS:
                return Known(value)
            if is_theirs(value) and not isinstance(value, type):
                if getattr(value, "__name__", name) not in WORDS:
                    raise LeftError(f"its {self.function.__name__} uses {name}")
                return ANY
            if isinstance(value, FunctionType):
                self.reached.run(value, None, ())
                return ANY
        raise LeftError(f"its {self.function.__name__} uses {name}")

    def attribute(self, holder: Any, name: str) -> Any:
        if holder is SUPER:
            return self.above(name)
        if isinstance(holder, Part):
            return self.own(holder, name)
        if isinstance(holder, Known) and not is_constant(holder.value):
            if not hasattr(holder.value, name):
                raise LeftError(f"its {self.function.__name__} uses {name}, which does not exist")
            return self.thing(name, getattr(holder.value, name))
        if isinstance(holder, Known) and isinstance(holder.value, torch.finfo):
            return ANY
        if name not in WORDS:
            raise LeftError(f"its {self.function.__name__} uses {name}")
        return FIXED if name in ("dtype", "device") else ANY

    def own(self, holder: Part, name: str) -> Any:
        """An attribute of the module, of its config, or of a module in it."""
        path, value = (*holder.path, name), holder.value
        if isinstance(value, Tensor):
            if name not in WORDS:
                raise LeftError(f"its {self.function.__name__} uses {name}")
            return FIXED if name in ("dtype", "device") else ANY
        if isinstance(value, nn.Module):
            if name == "training":
                return FIXED
            defined = inspect.getattr_static(type(value), name, None)
            if isinstance(defined, property):
                raise LeftError(f"its {self.function.__name__} reads the property {name}")
            if isinstance(defined, staticmethod):
                self.reached.run(defined.__func__, None, ())
                return ANY
            if isinstance(defined, FunctionType) and name not in vars(value):
                self.reached.run(defined, value, holder.path)
                return ANY
        try:
            found = getattr(value, name)
        except Exception:
            raise LeftError(f"its {self.function.__name__} reads {'.'.join(path)}, which it does not have") from None
        self.reached.read[path] = found
        if is_constant(found):
            return Known(found)
        if isinstance(found, (nn.Module, Tensor)):
            return Part(path, found)
        if isinstance(found, (FunctionType, BuiltinFunctionType)):
            return self.thing(name, found)
        if len(path) == 1 and not callable(found) and hasattr(found, "__dict__"):
            return Part(path, found)  # a config
        raise LeftError(f"its {self.function.__name__} reads {'.'.join(path)}, a {type(found).__name__}")

    def compared(self, now: Any, left: Any, right: Any) -> Any:
        none = any(isinstance(each, Known) and each.value is None for each in (left, right))
        if now.opname == "IS_OP" and none:
            other = left if isinstance(right, Known) and right.value is None else right
            if isinstance(other, (Known, Part)):
                return Known((other.value is None) != bool(now.arg))
            return FIXED
        if not all(each is FIXED or isinstance(each, Known) for each in (left, right)):
            raise LeftError(f"its {self.function.__name__} compares values or sizes of its input")
        if now.opname == "COMPARE_OP" and isinstance(left, Known) and isinstance(right, Known):
            sign = now.argval.removeprefix("bool(").rstrip(")")
            try:
                return Known(bool(COMPARE[sign](left.value, right.value)))
            except (KeyError, TypeError):
                return FIXED
        return FIXED

    def not_of_parts(self, taken: list[Any]) -> None:
        """Refuses parameters of a module inside: what is wrapped around that, as LoRA is, would not count."""
        for each in taken:
            if isinstance(each, Part) and len(each.path) > 1 and isinstance(each.value, Tensor):
                raise LeftError(
                    f"its {self.function.__name__} uses {'.'.join(each.path)} without a call of that module"
                )

    def value(self, now: Any, stack: list[Any]) -> None:
        """A value of those on the stack, of which only whether it is fixed is known."""
        op, effect = now.opname, dis.stack_effect(now.opcode, now.arg, jump=False)
        if op in ("CALL", "CALL_KW"):  # of which Python 3.11 gives a part to another instruction
            effect = -now.arg - 1 - (op == "CALL_KW")
        if op == "PUSH_NULL":
            stack.append(ANY)
            return
        if op.startswith("CALL") and op != "CALL_INTRINSIC_1":
            taken = stack[effect - 1 :]
            del stack[effect - 1 :]
            if any(isinstance(each, Part) and isinstance(each.value, nn.Module) and not each.path for each in taken):
                raise LeftError(f"its {self.function.__name__} hands the module itself to a function")
            self.not_of_parts(
                [] if any(isinstance(each, Known) and each.value is isinstance for each in taken) else taken
            )
            asked = any(isinstance(each, Known) and each.value in (isinstance, hasattr) for each in taken)
            super_of = next((each for each in taken if each is SUPER), None)
            stack.append(FIXED if asked else super_of or ANY)
            return
        self.not_of_parts(stack[min(effect - 1, -1) :] if effect <= 0 and op.startswith("BINARY") else [])
        taken = stack[min(effect - 1, -1) :] if effect <= 0 else stack[-1:] if op.startswith("UNPACK") else []
        del stack[len(stack) - len(taken) :]
        found = ANY
        if taken and all(each is FIXED or isinstance(each, Known) for each in taken):
            if op in ("BUILD_TUPLE", "BUILD_LIST") and all(isinstance(each, Known) for each in taken):
                found = Known(tuple(each.value for each in taken))
            elif op == "UNARY_NOT" and isinstance(taken[0], Known):
                found = Known(not taken[0].value)
            elif op.startswith(("BUILD_", "UNARY_", "LIST_")):
                found = FIXED
        elif op == "UNARY_NOT":
            raise LeftError(f"its {self.function.__name__} chooses by the values or sizes of its input")
        stack += [found] * (len(taken) + effect)
