"""A cache of launch plans, by the arguments that determine them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
_PLANNERS: list[Any] = []
_KEPT: list[dict[Any, Any]] = []
_MOST = 1024


def planned(function: Callable[..., T]) -> Callable[..., T]:
    """Caches the results of `function` for its last 1024 combinations of arguments: numbers, dtypes, a device; no
    tensors. The function may only read its arguments, properties of the device, and state that calls `forget_plans`
    when it changes."""
    cached = lru_cache(maxsize=_MOST)(function)
    _PLANNERS.append(cached)
    return cached


def kept_plans() -> dict[Any, Any]:
    """A cache by keys, for what is made of more than its key; write to it by `keep`."""
    _KEPT.append({})
    return _KEPT[-1]


def keep(cache: dict[Any, T], key: Any, made: T) -> T:
    """Returns what the cache keeps by `key` from now on: `made`, or what another thread made before."""
    if len(cache) >= _MOST:
        cache.clear()
    return cache.setdefault(key, made)


def forget_plans() -> None:
    """Empties the caches of plans. Call it when state that plans depend on changes."""
    for cached in _PLANNERS:
        cached.cache_clear()
    for cache in _KEPT:
        cache.clear()
