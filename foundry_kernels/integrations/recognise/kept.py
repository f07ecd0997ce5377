"""What was found out about a class, in the user's cache: a file for each answer, by the code that it is about."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import torch

from foundry_kernels.core.cache_folder import cache_folder
from foundry_kernels.integrations.adapters.base import MLP, Adapter, Norm
from foundry_kernels.integrations.adapters.gpt_like import PlainMLP
from foundry_kernels.integrations.adapters.linear_attention import GatedNorm

ADAPTERS: dict[str, Any] = {cls.__name__: cls for cls in (Norm, GatedNorm, MLP, PlainMLP)}


def key_of(functions: Iterable[FunctionType], *others: Any) -> str:
    """Returns the name of an answer: of the code, its defaults, and whatever else the answer depends on."""
    told: list[Any] = [_code(f.__code__) + repr((f.__defaults__, f.__kwdefaults__)) for f in functions]
    text = repr(
        (
            told,
            _plain(others),
            sys.version_info[:2],
            torch.__version__,
            sys.modules["foundry_kernels"].__version__,
            _own_code(),
        )
    )
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _own_code() -> str:
    """Returns what tells one state of the code that finds answers from another, between two versions."""
    told = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(__file__).parents[1] / "adapters"):
        for path in sorted(folder.glob("*.py")):
            told.update(path.read_bytes())
    return told.hexdigest()


def _code(code: CodeType) -> str:
    inner = [_code(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts]
    return repr((code.co_code, inner, code.co_names, code.co_varnames, code.co_freevars))


def _plain(value: Any) -> Any:
    """Returns what a value is in any process."""
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, FunctionType):
        return _code(value.__code__)
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)


def load(key: str) -> Adapter | str | None:
    """Returns the answer of this name, an adapter or a reason; None where there is none that can be read."""
    try:
        found = json.loads(_path(key).read_text())
        if isinstance(found, str):
            return found
        given = {name: tuple(v) if isinstance(v, list) else v for name, v in found["fields"].items()}
        adapter: Adapter = ADAPTERS[found["adapter"]](**given)
    except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError):
        return None
    usual = type(adapter)()
    fields = [field.name for field in dataclasses.fields(usual)]
    return adapter if all(_like(getattr(adapter, f), getattr(usual, f)) for f in fields) else None


def _like(value: Any, usual: Any) -> bool:
    """Returns whether a value may be in the place of `usual`."""
    if isinstance(usual, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(usual, bool)
    return value is None or isinstance(value, (str, float)) or (isinstance(value, tuple) and usual is None)


def save(key: str, answer: Adapter | str) -> None:
    """Keeps an answer, where the user's cache can be written."""
    told: Any = answer
    if isinstance(answer, Adapter):
        told = {"adapter": type(answer).__name__, "fields": dataclasses.asdict(answer)}
    with contextlib.suppress(OSError, RuntimeError):
        path = _path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(told))
        os.replace(beside, path)


def _path(key: str) -> Path:
    return cache_folder() / "recognised" / f"{key}.json"
