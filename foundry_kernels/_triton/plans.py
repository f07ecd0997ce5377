"""What launchers have planned, kept by the arguments that it follows from."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

T = TypeVar("T")
_PLANNERS: list[Any] = []


def planned(function: Callable[..., T]) -> Callable[..., T]:
    """Keeps what `function` returns for its last 1024 combinations of arguments: numbers, dtypes, a device; no tensors.
    It reads nothing else, but for the device's properties and what `forget_plans` follows."""
    cached = lru_cache(maxsize=1024)(function)
    _PLANNERS.append(cached)
    return cached


def forget_plans() -> None:
    """Empties the caches of plans; called where plans would come out differently from now on."""
    for cached in _PLANNERS:
        cached.cache_clear()
