"""Tables that follow a module to another device and are never cast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor


class FixedTables(torch.nn.Module):
    """Base of a module whose buffers are computed, and so lie outside of the state dict.

    They follow the module to another device, but stay float32 under ``.to(torch.bfloat16)`` and the like. Built on the
    meta device, they get their values with ``to_empty(device=...)``.
    """

    #: Names of the buffers, in the order of `_tables`.
    names: tuple[str, ...] = ()

    def _tables(self, device: Any) -> tuple[Tensor, ...]:
        raise NotImplementedError

    def _register(self, device: Any) -> None:
        device = torch.get_default_device() if device is None else device
        for name, table in zip(self.names, self._tables(device), strict=True):
            self.register_buffer(name, table, persistent=False)

    def _current(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    def reset_parameters(self) -> None:
        """Compute the tables anew on the device they are on."""
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
