"""Numbers as callers of flash-attn and PyTorch pass them: Python's, NumPy's, tensors of one element."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from foundry_kernels.core.checks import constants

#: Symbolic numbers of torch.compile are returned as they are.
_INTS: Any = (int, torch.SymInt)
_FLOATS: Any = (float, int, torch.SymFloat, torch.SymInt)


def as_int(name: str, value: Any) -> int:
    """`value` as an int.

    Raises:
        TypeError: it is a bool, a float, or a tensor or array of more than one element.
    """
    if isinstance(value, _INTS) and not isinstance(value, bool):
        return value
    if not isinstance(value, bool) and not (isinstance(value, Tensor) and value.dtype == torch.bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise TypeError(f"{name} must be an int; got {value!r}")


def as_bool(name: str, value: Any) -> Any:
    """`value` as a bool, or what torch.compile has in place of one: anything with a truth value of its own, as numbers
    and arrays of one element have.

    Raises:
        TypeError: it is a string or a list, or an array or tensor of more than one element.
    """
    if value is True or value is False or isinstance(value, torch.SymBool):
        return value
    try:
        if hasattr(value, "__bool__"):  # a string has none: its length would count
            return bool(value)
    except (ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} must be a bool; got {value!r}")


def as_float(name: str, value: Any) -> float:
    """`value` as a float, or an int that stays one.

    Raises:
        TypeError: it is a string, or a tensor or array of more than one element.
    """
    if isinstance(value, _FLOATS):
        (number,) = constants(value)
        return number
    try:
        if hasattr(value, "__float__"):  # a string has none, and float() would parse it
            return float(value)
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} must be a float; got {value!r}")


def as_window(window_size: Iterable[SupportsIndex]) -> tuple[int | None, int | None]:
    """flash-attn's ``(left, right)``, with None in place of -1.

    Raises:
        TypeError: it is no pair. ValueError: one of the two is no integer, or is below -1.
    """
    if not isinstance(window_size, Iterable) or len(pair := tuple(window_size)) != 2:
        raise TypeError(f"window_size must be a pair (left, right); got {window_size!r}")
    try:
        left, right = (as_int("window_size", side) for side in pair)
    except TypeError:
        left = right = -2
    if left < -1 or right < -1:
        raise ValueError(f"window_size must hold ints >= 0, or -1 for unbounded; got {window_size!r}")
    return None if left == -1 else left, None if right == -1 else right
