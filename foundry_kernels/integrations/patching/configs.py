"""The configs in a patched model, which say what its attention and its masks are."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from foundry_kernels.integrations.adapters.attention import Attention
from foundry_kernels.integrations.adapters.base import State

ATTENTION = "_attn_implementation"


class Configs:
    """The configs in a model: copied, because another model may hold the same ones, and set to our attention.

    A new model that is made from such a config has our attention too. BLOOM and Falcon choose none by the config, so
    that theirs would get our masks: there the model's config stays, and its layers and what makes their masks get
    another view of it (`inner_config`).
    """

    def __init__(self, model: nn.Module) -> None:
        self._held: list[tuple[Any, Any]] = [
            (m, m.config) for m in model.modules() if hasattr(vars(m).get("config"), ATTENTION)
        ]

    def switch(self, layers: list[tuple[Any, Attention, State]], names: tuple[str, str]) -> None:
        """Args: names: of the attention, for a family that transformers lets have SDPA and for any other one."""
        importlib.import_module("foundry_kernels.integrations.attention.functions")  # registers the names
        copies: dict[int, Any] = {}  # one for each object, however often it occurs
        for module, config in self._held:
            module.config = copy.deepcopy(config, copies)
        whole = any(adapter.whole for _, adapter, _ in layers)
        headless = {m: set(m.modules()) for m, _ in self._held if whole and getattr(m, "base_model", m) is m}
        views: dict[int, Any] = {}
        named: list[tuple[Any, str]] = []
        for module, adapter, state in layers:
            name = names[0] if adapter.may_be_sdpa(module) else names[1]
            if getattr(adapter, "as_eager", False):
                name = {"foundry": "foundry_as_eager", "foundry_or_eager": "eager"}.get(name, name)
            if not adapter.whole:
                state.previous["attention"] = module.config._attn_implementation
                named.append((module.config, name))
                continue
            for holder in (m for m, parts in headless.items() if module in parts):
                if not hasattr(holder.config, "_foundry_outer"):
                    outer = holder.config
                    if id(outer) not in views:
                        views[id(outer)] = inner_config(outer, name)
                    holder.config = views[id(outer)]
                state.previous |= {"config": holder.config, "attention": holder.config._foundry_previous}
        for config, name in named:
            config._attn_implementation = name
        if named:
            layers[0][2].previous["outer"] = self._name_outer({id(config): name for config, name in named})

    def _name_outer(self, named: dict[int, str]) -> list[Any]:
        """A model of several parts may make the masks of one by the config of the whole: this names our attention too,
        where it was left to transformers. Returns the configs."""
        outer: list[Any] = []
        for config in {id(m.config): m.config for m, _ in self._held}.values():
            names = [named[id(part)] for part in _parts(config) if id(part) in named]
            if names and id(config) not in named and config._attn_implementation == "sdpa":
                config._attn_implementation_internal = names[0]  # and not of the other parts
                outer.append(config)
        return outer

    def restore(self) -> None:
        for module, config in self._held:
            module.config = config


def _parts(config: Any) -> Iterator[Any]:
    for key in getattr(config, "sub_configs", None) or ():
        part = getattr(config, key, None)
        if part is not None:
            yield part
            yield from _parts(part)


def inner_config(outer: Any, attention: str) -> Any:
    """Returns a config that holds what `outer` holds, also what is set in either of them later, but has another
    attention; that of `outer` once it is set."""
    members = {
        "__reduce_ex__": lambda self, protocol: (inner_config, (outer, attention)),
        ATTENTION: property(_inner_attention, getattr(type(outer), ATTENTION).fset),
        "_foundry_outer": outer,
        "_foundry_attention": attention,
        "_foundry_previous": outer._attn_implementation,
    }
    made = type(type(outer).__name__, (type(outer),), members)
    config: Any = object.__new__(made)
    object.__setattr__(config, "__dict__", vars(outer))
    return config


def _inner_attention(self: Any) -> Any:
    own = self._attn_implementation_internal
    return self._foundry_attention if own == self._foundry_previous else own


def give_back(config: Any, previous: str | None) -> None:
    """Undoes what `Configs.switch` made of `config`, unless its attention has been set since."""
    if hasattr(config, "_foundry_outer"):
        config.__class__ = type(config._foundry_outer)
    elif str(config._attn_implementation).startswith("foundry"):
        config._attn_implementation = previous


def give_back_outer(configs: Iterable[Any]) -> None:
    for config in configs:
        if str(config._attn_implementation).startswith("foundry"):
            config._attn_implementation_internal = "sdpa"
