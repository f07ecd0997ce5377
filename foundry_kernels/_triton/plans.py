"""A cache of launch plans, by the arguments that determine them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
_PLANNERS: list[Any] = []


def planned(function: Callable[..., T]) -> Callable[..., T]:
    """Caches the results of `function` for its last 1024 combinations of arguments: numbers, dtypes, a device; no
    tensors. The function may only read its arguments, properties of the device, and state that calls `forget_plans`
    when it changes."""
    cached = lru_cache(maxsize=1024)(function)
    _PLANNERS.append(cached)
    return cached


def forget_plans() -> None:
    """Empties the caches of plans. Call it when state that plans depend on changes."""
    for cached in _PLANNERS:
        cached.cache_clear()
