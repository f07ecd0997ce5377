"""Whether the tables of a rotation have equal halves, or pairs: `rope` reads one entry of each pair.

A rotation function that reads a whole row cannot tell. So every module of the model that makes tables in the same file
is asked, by a run of a copy with random frequencies, and the file is read: no other statement may change a table on its
way from there to the rotation.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import math
import re
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from foundry_kernels.integrations.adapters.base import split_names
from foundry_kernels.integrations.recognise.rotations import own_bases

#: The names that tables have in code.
TABLE = re.compile(r"(\w+_)?(cos|sin)(_\w)?$|position_embeddings$|rotary_(pos_)?emb(edding)?s?$")
#: What may be done to a table: nothing that moves or changes entries of a row.
HARMLESS = split_names("to float unsqueeze squeeze type_as contiguous items values")
#: Positions of 5 tokens that modules take which make tables.
POSITIONS = ((2, 5), (3, 2, 5), (5, 2), (5, 3), (2, 5, 2), (2, 5, 3), (5,))


class Tables:
    """What is known of the tables of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @functools.cached_property
    def _names(self) -> dict[nn.Module, str]:
        return {module: f"{name}." if name else "" for name, module in self._model.named_modules()}

    @functools.cached_property
    def _makers(self) -> dict[str, tuple[nn.Module, frozenset[str]]]:
        """The modules whose code takes cosines and sines, and what their tables are like, by name."""
        makers = [m for m in self._names if _takes_cosines(type(m))]  # type: ignore[arg-type]
        return {self._names[maker]: (maker, structure(maker)) for maker in makers}

    def why_unequal(self, module: nn.Module, home: str, function: str, needs: str) -> str | None:
        """Returns the reason why the tables that methods of `module` in the file `home` give to `function` are not
        known to have equal halves or pairs; None if they are.

        They are those of the innermost module around it that holds modules which make tables.
        """
        around = self._names[module]
        while not (found := [maker for name, maker in self._makers.items() if name.startswith(around)]) and around:
            around = around[:-1].rpartition(".")[0]
            around = f"{around}." if around else ""
        if not found:
            return "nothing in the model is known to make its tables"
        for maker, equal in found:
            if needs not in equal:
                return f"the tables of {type(maker).__name__} are not known to have equal {needs}"
        homes = {home, *(type(maker).__module__ for maker, _ in found)}
        callers = frozenset(base.__name__ for base in type(module).__mro__ if base.__module__ == home)
        reasons = (_why_changed(sys.modules[name], function, callers) for name in sorted(homes))
        return next((reason for reason in reasons if reason is not None), None)


@functools.cache
def _takes_cosines(cls: type) -> bool:
    names: set[str] = set()
    for base in own_bases(cls):
        for value in vars(base).values():
            value = inspect.unwrap(value) if callable(value) else value
            if isinstance(value, FunctionType):
                names.update(value.__code__.co_names)
    return {"cos", "sin"} <= names


def structure(module: nn.Module) -> frozenset[str]:
    """Returns which of "halves" and "pairs" are equal in both tables that a module makes, in every way in which it can
    be called with small positions; none if it makes no two tables."""
    if module._modules:
        return frozenset()
    twin, found = _copy(module), None
    run: Any = type(module).forward
    kinds = [n.removesuffix("_inv_freq") for n in module._buffers if n.endswith("_inv_freq") and "original" not in n]
    given = list(inspect.signature(type(module).forward).parameters)[1:]
    more: list[tuple[Any, ...]] = [()] if len(given) < 3 else [(kind,) for kind in kinds] or [()]
    for shape, rest in itertools.product(POSITIONS, more):
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                made = run(twin, torch.zeros(2, 5, 4, device="cpu"), _positions(shape), *rest)
        except Exception:  # positions that it was not made for
            continue
        pair = isinstance(made, (tuple, list)) and len(made) == 2 and all(isinstance(t, Tensor) for t in made)
        if not pair or made[0].shape != made[1].shape or made[0].shape[-1] % 2 or not made[0].shape[-1]:
            return frozenset()
        equal = {"halves" for _ in (0,) if all(torch.equal(*t.chunk(2, -1)) for t in made)}
        equal |= {"pairs" for _ in (0,) if all(torch.equal(t[..., ::2], t[..., 1::2]) for t in made)}
        found = equal if found is None else found & equal
    return frozenset(found or ())


def _positions(shape: tuple[int, ...]) -> Tensor:
    return (torch.arange(math.prod(shape), device="cpu") % 5).view(shape)


def _copy(module: nn.Module) -> Any:
    """Returns a copy with random numbers in place of floating-point ones, on the CPU; the caller's is only read."""
    draw = torch.Generator().manual_seed(0)
    made: Any = type(module).__new__(type(module))
    made.__dict__.update({n: copy.copy(v) if isinstance(v, (dict, set, list)) else v for n, v in vars(module).items()})
    for stored in (made._buffers, made._parameters):
        for name, value in stored.items():
            if value is not None and value.is_floating_point():
                stored[name] = torch.rand(value.shape, generator=draw, device="cpu") + 0.1
    return made


# What the file does with tables ---------------------------------------------------------------------------------------


@functools.cache
def _tree(home: ModuleType) -> ast.Module | None:
    try:
        return ast.parse(inspect.getsource(home))
    except (OSError, TypeError, SyntaxError):
        return None


@functools.cache
def _why_changed(home: ModuleType, function: str, callers: frozenset[str]) -> str | None:
    """Returns the reason why a file may change tables between the module that makes them and the calls of a rotation
    function in the classes `callers`."""
    tree = _tree(home)
    if tree is None:
        return "its file has no source to read"
    for cls in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for call in _calls(cls, function) if cls.name in callers else ():
            given = [*call.args[-2:], *(k.value for k in call.keywords)]
            if not all(map(_kept, given)):
                return f"line {call.lineno} of its file changes a table"
        if not _makes(cls):
            for made in (node for node in cls.body if isinstance(node, ast.FunctionDef) and _handles_tables(node)):
                for target, value, line in _assignments(made):
                    if TABLE.match(target) and not _kept(value):
                        return f"line {line} of its file changes a table"
    return None


def _calls(cls: ast.ClassDef, function: str) -> Iterator[ast.Call]:
    for node in ast.walk(cls):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function:
            yield node


def _makes(cls: ast.ClassDef) -> bool:
    names = {node.attr for node in ast.walk(cls) if isinstance(node, ast.Attribute)}
    return {"cos", "sin"} <= names


def _handles_tables(made: ast.FunctionDef) -> bool:
    """Whether a method gets tables, or calls a module for them."""
    taken = (*made.args.posonlyargs, *made.args.args, *made.args.kwonlyargs)
    if any(TABLE.match(a.arg) for a in taken):
        return True
    calls = (n.func.attr for n in ast.walk(made) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))
    return any(re.search("rot(ary|ation)|rope|pos(ition)?_emb", name) for name in calls)


def _assignments(made: ast.FunctionDef) -> Iterator[tuple[str, ast.expr, int]]:
    for node in ast.walk(made):
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)) and node.value is not None:
            value = ast.BinOp(node.target, node.op, node.value) if isinstance(node, ast.AugAssign) else node.value
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for name in ast.walk(target):
                    if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store):
                        yield name.id, value, node.lineno


def _kept(value: ast.expr) -> bool:
    """Whether an expression gives tables on as they are, or gets them from a module."""
    if isinstance(value, (ast.Name, ast.Attribute, ast.Constant)):
        return True
    if isinstance(value, ast.Starred):
        return _kept(value.value)
    if isinstance(value, (ast.Tuple, ast.List)):
        return all(map(_kept, value.elts))
    if isinstance(value, ast.Dict):
        return all(map(_kept, value.values))
    if isinstance(value, ast.IfExp):
        return _kept(value.body) and _kept(value.orelse)
    if isinstance(value, ast.DictComp):
        return _kept(value.value)
    if isinstance(value, (ast.GeneratorExp, ast.ListComp)):
        return _kept(value.elt)
    if isinstance(value, ast.Subscript):
        return _kept(value.value) and _whole_rows(value.slice)
    if isinstance(value, ast.Call):
        return _kept_by(value)
    return False


def _kept_by(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name):
        return call.func.id in ("tuple", "list", "dict") and all(map(_kept, call.args))
    if not isinstance(call.func, ast.Attribute):
        return False
    owner = call.func.value
    if isinstance(owner, ast.Name) and owner.id == "self":  # a module that is asked, or a method that is read here
        return True
    return call.func.attr in HARMLESS and _kept(owner)


def _whole_rows(index: ast.expr) -> bool:
    """Whether an index takes rows of a table, or a table by name, and no part of a row."""
    if isinstance(index, ast.Tuple):
        last = index.elts[-1]
        return isinstance(last, ast.Slice) and last.lower is last.upper is last.step is None
    return isinstance(index, (ast.Name, ast.Attribute, ast.Constant))
