"""Attention of any model of transformers whose classes ask transformers for the attention function that their config
names: it needs no row in the table. Their forward stays, with its projections and caches; its rotation is `rope` where
it is recognised (`rotating.py`).

Such a model gets the masks that "sdpa" would give it (`mask_functions.py`), and what its attention function is given
besides is what SDPA takes or ignores. So a family that runs on SDPA runs here. A family that transformers lets have no
SDPA gets the masks of "eager", if its eager attention is known to compute the same (`recognise/eager.py`).
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from dataclasses import dataclass, replace
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters.attention import Attention
from foundry_kernels.integrations.adapters.base import names_of
from foundry_kernels.integrations.adapters.rotating import (
    Rotating,
    methods_of,
    rotating_members,
    rotations_of,
    unknown_rotation,
)
from foundry_kernels.integrations.recognise.eager import why_other

#: What an attention's forward uses that asks for its function.
INTERFACE = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class InterfaceAttention(Rotating, Attention):
    """A class whose forward calls the attention function of its config, and has no row of its own."""

    arguments = frozenset()  # its own forward stays
    #: Whether its masks are those of eager attention, of a family without SDPA.
    as_eager: bool = False
    #: Whether its code does for "eager" and "sdpa" what it must do for our names too.
    compares: bool = False

    def known(self) -> frozenset[str]:
        return frozenset()

    def why_not(self, module: nn.Module) -> str | None:
        if not hasattr(vars(module).get("config"), "_attn_implementation"):
            return "it has no config of its own that names its attention"
        if not self.may_be_sdpa(module) and (reason := _why_other(module, sys.modules[self.home(module)])) is not None:
            return f"its family does not run on SDPA, and {reason}"
        if _compares_elsewhere(sys.modules[self.home(module)]):
            return "its family does something else for an attention that is called neither 'sdpa' nor 'eager'"
        return super().why_not(module)

    def ops(self, module: nn.Module) -> tuple[str, ...]:
        return (*super().ops(module), "flash_attention")

    def members(self, original: type) -> dict[str, Any]:
        return rotating_members(original, self.rotations, _with_our_names, _compares)

    def unrecognised(self) -> Rotating | None:
        return super().unrecognised() if not self.compares else None

    def for_family(self, module: nn.Module) -> Rotating:
        return self if self.may_be_sdpa(module) else replace(self, as_eager=True)


def _why_other(module: nn.Module, home: ModuleType) -> str | None:
    """Returns the reason why a family without SDPA may do what this package does not."""
    eager: Any = getattr(home, "eager_attention_forward", None)
    if eager is None:
        return "has no eager attention to compare"
    if re.search(rf"{COMPARED}(==|!=|in\b|not\b)", BOTH.sub("", source_of(home))):
        return "it does something of its own for a name of an attention"
    cls: Any = type(module)
    return why_other(eager, next(base for base in cls.__mro__ if "forward" in vars(base)))


#: In a source: the name of the attention, and whether it is one of the two that compute with masks.
COMPARED = r"_attn_implementation\s*"
BOTH = re.compile(COMPARED + r"in\s*[(\[{]\s*[\"'](?:eager[\"'],\s*[\"']sdpa|sdpa[\"'],\s*[\"']eager)[\"'],?\s*[)\]}]")


@functools.cache
def _compares_elsewhere(home: ModuleType) -> bool:
    """Returns whether the code of a family compares the name of its attention with "sdpa" and "eager" at once, and not
    in attention alone: what any other attention gets is then for kernels of its own. Where "sdpa" alone is named, any
    other gets what eager does."""
    lists = re.findall(r"_attn_implementation\s+(?:not\s+)?in\s*[(\[{]([^)\]}]*)", source_of(home))
    if not lists:
        return False
    classes = [value for value in vars(home).values() if isinstance(value, type) and value.__module__ == home.__name__]
    own = [
        plain for cls in classes if INTERFACE in _names(cls)
        for name, plain in methods_of(cls) if name in vars(cls) and _compares(plain)
    ]  # fmt: skip
    known = sum(len(BOTH.findall(inspect.getsource(plain))) for plain in own)
    return sum("sdpa" in names and "eager" in names for names in lists) > known


def _compares(function: FunctionType) -> bool:
    code = function.__code__
    return "_attn_implementation" in code.co_names and any(map(_is_both, code.co_consts))


def _is_both(constant: Any) -> bool:
    return isinstance(constant, (tuple, frozenset)) and {*constant} == {"eager", "sdpa"}


def _with_our_names(code: CodeType, home: dict[str, Any]) -> CodeType:
    """Returns code that does for this package's names what it does for "eager" and "sdpa"."""
    ours = (
        "eager",
        "sdpa",
        "foundry",
        *(f"foundry_{name}" for name in ("as_eager", "or_error", "or_sdpa", "or_eager")),
    )
    return code.replace(co_consts=tuple(type(c)(ours) if _is_both(c) else c for c in code.co_consts))


@functools.cache
def source_of(home: ModuleType) -> str:
    """Returns the source of a module of Python; empty where there is none."""
    try:
        return inspect.getsource(home)
    except (OSError, TypeError):
        return ""


@functools.cache
def _names(cls: type) -> frozenset[str]:
    """Returns the names that the forward of a class uses."""
    code = getattr(inspect.unwrap(getattr(cls, "forward", _names)), "__code__", None)
    return frozenset() if code is None else frozenset(names_of(code))


@functools.cache
def interface_adapter(cls: type) -> Rotating | None:
    """Returns the adapter of a class of modules that has no row and asks for an attention function or calls a rotation
    function; None for any other."""
    rotations, attends = rotations_of(cls), INTERFACE in _names(cls)
    if not attends and not rotations:
        return None
    if not attends:
        asks_none = "its attention stays: it asks transformers for no attention function"
        return Rotating(rotations=rotations, stays=asks_none)
    unknown = unknown_rotation(cls)
    stays = f"its rotation stays: {unknown} is no form that this package has" if unknown else ""
    compares = any(_compares(plain) for _, plain in methods_of(cls))
    return InterfaceAttention(rotations=rotations, stays=stays, compares=compares)
