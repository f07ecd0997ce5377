"""Tables that move to another device with their module and are never cast."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from foundry_kernels.core.checks import device_or_default
from foundry_kernels.core.registry import is_subclass
from foundry_kernels.nn._scripting import refuse_scripting


class FixedTables(torch.nn.Module):
    """Base class of a module whose buffers are computed and therefore not part of the state dict.

    They move to another device with the module, but stay float32 under ``.to(torch.bfloat16)`` and the like. A module
    that was built on the meta device gets the values of its tables with ``to_empty(device=...)``.
    """

    __prepare_scriptable__ = refuse_scripting

    #: Names of the buffers, in the order of `_tables`.
    names: tuple[str, ...] = ()

    def _tables(self, device: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _register(self, device: Any) -> None:
        device = device_or_default(device)
        for name, table in zip(self.names, self._tables(device), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _current(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    def reset_parameters(self) -> None:
        """Recomputes the tables on their device."""
        for name, table in zip(self.names, self._tables(self._current()[0].device), strict=True):
            setattr(self, name, table)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Every move or cast of a module goes through here. Only the device is taken from the result: a cast
        # would round the tables, and `to_empty` would leave them without values.
        before = self._current()
        super()._apply(fn, recurse)
        device = self._current()[0].device
        if before[0].is_meta and device.type != "meta":
            self.reset_parameters()
        else:
            for name, table in zip(self.names, before, strict=True):
                setattr(self, name, table.to(device))
        return self


class PositionTables(FixedTables):
    """Base class of tables with one row per position. They start with `max_positions` rows and grow when a call needs a
    position beyond their rows. Existing rows keep their bits.

    In eager mode a module grows by replacing its buffers with buffers of at least twice the size. While torch.compile
    traces, buffers cannot be replaced, so an operator computes the rows in the same way. A captured CUDA graph keeps
    reading the tables that it was captured with, so old tables are kept alive; no table grows during a capture.

    With dynamic scaling (`follows_length`) the rows depend on the length of the sequence. Up to `max_positions` the
    table is used. For longer sequences, rows are computed for each length and do not replace the buffers.
    """

    max_positions: int
    #: The key of the tables in `builders`.
    kind: ClassVar[str]
    #: The functions that compute rows, by kind: (first, behind the last, length of the sequence, **recipe).
    builders: ClassVar[dict[str, Callable[..., tuple[Tensor, ...]]]] = {}

    def _recipe(self) -> dict[str, Any]:
        """The builder's other arguments: numbers, strings and None."""
        raise NotImplementedError

    @property
    def follows_length(self) -> bool:
        return False

    def _tables(self, device: Any) -> tuple[Tensor, ...]:
        # As text, because operators accept strings.
        self._text = json.dumps([self.kind, self._recipe()])
        return _compute(self._text, 0, self.max_positions, self.max_positions, device)

    def rows(self, start: int, stop: int) -> tuple[Tensor, ...]:
        """Returns the tables' rows for the positions `start` .. `stop` - 1 of a sequence that ends there.

        Raises:
            ValueError: `start` is below 0; tables on a GPU would have to grow while a CUDA graph is captured.
        """
        if start < 0:
            raise ValueError(f"positions must not be below 0; got {start}")
        tables = self._current()
        if any(stop > table.shape[0] for table in tables):
            if torch.compiler.is_compiling():
                return tuple(_position_rows(tables, self._text, start, stop, stop))
            if self.follows_length:
                _not_capturing(tables[0].device)
                return _kept_for(tables, self._text, start, stop, stop)
            tables = list(self._grow(stop))
        return tuple(table[start:stop] for table in tables)

    def reserve(self, stop: int) -> tuple[Tensor, ...]:
        """Returns whole tables with at least `stop` rows, for a sequence of that length. Tables that do not depend on
        the length grow now, so that later calls, CUDA graphs and compiled code need not grow them."""
        tables = self._current()
        if all(stop <= table.shape[0] for table in tables):
            return tuple(tables)
        return self.rows(0, stop) if self.follows_length or torch.compiler.is_compiling() else self._grow(stop)

    def tables_for(self, positions: Tensor, end: int | None) -> tuple[Tensor, ...]:
        """Returns whole tables for a tensor of positions. The last position is read if this is free (on the CPU) or if
        the rows depend on it. Otherwise `end`, an upper bound of the positions, gives the number of rows; with None the
        tables are used as they are."""
        looks = (positions.is_cpu or self.follows_length) and not (positions.is_meta or is_subclass(positions))
        if looks and not torch.compiler.is_compiling():
            end = int(positions.max()) + 1 if positions.numel() else None
        return tuple(self._current()) if end is None else self.reserve(end)

    def _grow(self, stop: int) -> tuple[Tensor, ...]:
        with _LOCK:
            tables = self._current()
            rows = min(table.shape[0] for table in tables)
            if rows >= stop:  # by another thread
                return tuple(tables)
            device = _not_capturing(tables[0].device)
            stop = max(stop, 2 * rows)
            # This leaves inference mode, because a later training step could not save inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                more = _compute(self._text, rows, stop, stop, device)
                grown = tuple(torch.cat([old[:rows], new]) for old, new in zip(tables, more, strict=True))
            if device.type == "cuda":
                torch.cuda.synchronize(device)  # other threads have other streams
                _OUTGROWN.setdefault(self, []).append(tables)
            for name, table in zip(self.names, grown, strict=True):
                setattr(self, name, table)
            return grown


_LOCK = threading.Lock()
#: Tables on a GPU that a captured CUDA graph may still read. Together they are smaller than the tables that replaced
#: them.
_OUTGROWN: WeakKeyDictionary[PositionTables, list[list[Tensor]]] = WeakKeyDictionary()


def _not_capturing(device: torch.device) -> torch.device:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "positions are beyond the rows of a table, which cannot grow while a CUDA graph is captured: run the model "
            "once at that length before, or make it with Transformer.extended"
        )
    return device


def _compute(recipe: str, start: int, stop: int, length: int, device: Any) -> tuple[Tensor, ...]:
    kind, options = json.loads(recipe)
    return tuple(table.to(device) for table in PositionTables.builders[kind](start, stop, length, **options))


@functools.lru_cache(maxsize=2)  # the layers of a model ask for the same rows one after the other
def _kept(recipe: str, start: int, stop: int, length: int, device: torch.device) -> tuple[Tensor, ...]:
    with torch.inference_mode(False):
        return _compute(recipe, start, stop, length, device)


def _kept_for(tables: list[Tensor], *rows: Any) -> tuple[Tensor, ...]:
    device = tables[0].device
    return (_kept.__wrapped__ if is_subclass(tables[0]) else _kept)(*rows, device)  # no fake tensor is for others


_LIBRARY = torch.library.Library("foundry_kernels", "FRAGMENT")
_LIBRARY.define(
    "position_rows(Tensor[] tables, str recipe, SymInt start, SymInt stop, SymInt length) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.cudagraph_unsafe),  # it computes on the CPU
)


def _rows_impl(tables: list[Tensor], recipe: str, start: int, stop: int, length: int) -> list[Tensor]:
    """Computes rows without changing the tables; `tables` give the device."""
    return [table.clone() for table in _kept_for(tables, recipe, start, stop, length)]


def _empty_rows(tables: list[Tensor], recipe: str, start: int, stop: int, length: int) -> list[Tensor]:
    return [table.new_empty((stop - start, *table.shape[1:])) for table in tables]


for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("position_rows", _rows_impl, _key)
torch.library.register_fake("foundry_kernels::position_rows", _empty_rows, lib=_LIBRARY)
_position_rows = torch.ops.foundry_kernels.position_rows.default
