"""Rotary position embedding as a module."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from foundry_kernels.core.checks import check_bool, check_int
from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._tables import PositionTables
from foundry_kernels.ops.rope import RopeScaling, rope
from foundry_kernels.ops.rope.table import check_table, rope_rows


class RotaryEmbedding(PositionTables):
    """Rotates queries and keys by their positions; see :func:`foundry_kernels.rope`.

    The tables `cos` and `sin`, ``[P, dim / 2]``, are buffers outside the state dict. They move to another device with
    the module, but stay float32 under ``.to(torch.bfloat16)`` and the like: bfloat16 has 8 bits of precision, too few
    to tell the angles of neighbouring positions apart. A module that was built on the meta device gets their values
    with ``to_empty(device=...)``.

    They start with `max_positions` rows and grow when a call needs more; `reserve(n)` grows them at once. With
    "dynamic" scaling, sequences up to `max_positions` use the frequencies of `max_positions`. Longer ones use the
    frequencies of their length, which is the last position of the call, so that keys in a cache keep their rotation (as
    in transformers).

    Args:
        dim: the rotary dimensions of a head, even; a head's other dimensions are copied.
        max_positions: rows of the tables at first.
        base: of the geometric series of wavelengths.
        scaling: None, or a :class:`foundry_kernels.RopeScaling`.
        interleaved: False pairs ``(i, i + dim/2)`` (Hugging Face's Llama), True ``(2i, 2i+1)`` (Meta's Llama).
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        TypeError: a size is no int, `interleaved` no bool.
        ValueError: `dim` is odd or below 2, `max_positions` below 1, an unknown backend.
    """

    cos: Tensor
    sin: Tensor
    names = ("cos", "sin")
    kind = "rotary"

    def __init__(
        self,
        dim: int,
        max_positions: int = 2048,
        *,
        base: float = 10000.0,
        scaling: RopeScaling | None = None,
        interleaved: bool = False,
        device: Any = None,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_int("dim", dim)
        check_int("max_positions", max_positions)
        check_bool("interleaved", interleaved)
        if dim < 2 or dim % 2:
            raise ValueError(f"dim must be even and at least 2; got {dim}")
        if max_positions < 1:
            raise ValueError(f"max_positions must be at least 1; got {max_positions}")
        self.backends = plan(backend, ("rope",))
        self.dim, self.max_positions, self.base, self.scaling = dim, max_positions, base, scaling
        self.interleaved = interleaved
        self._register(device)

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.scaling is not None and self.scaling.rope_type == "dynamic"

    def _recipe(self) -> dict[str, Any]:
        check_table(self.dim, self.base, self.scaling)
        scaling = None if self.scaling is None else dataclasses.asdict(self.scaling)
        return {"rotary_dim": self.dim, "base": self.base, "scaling": scaling}

    def forward(
        self, q: Tensor, k: Tensor, positions: Tensor | int | None = None, end: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rotate q ``[B, H, T, D]`` and k ``[B, Hk, T, D]``, ``D >= dim``.

        Args:
            positions: None for 0 .. T-1; an int for the position of the first token; or an integer tensor ``[B, T]``
                or ``[T]``.
            end: a number above all positions of a tensor. It is required on a GPU and under torch.compile if some
                positions are beyond the tables' rows, because reading them would wait. Elsewhere it is ignored.

        Raises:
            ValueError: positions below 0, or the operation's own conditions.
        """
        cos, sin, positions = self.tables(q.shape[-2], positions, end)
        interleaved, backend = self.interleaved, self.backends["rope"]
        return rope(q, k, cos, sin, interleaved=interleaved, positions=positions, backend=backend)

    def tables(
        self, length: int, positions: Tensor | int | None, end: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """cos, sin and positions of `length` tokens, as :func:`foundry_kernels.rope` takes them; the arguments are
        those of :meth:`forward`."""
        if isinstance(positions, Tensor):
            cos, sin = self.tables_for(positions, end)
            return cos, sin, positions
        start = 0 if positions is None else positions
        cos, sin = self.rows(start, start + length)
        return cos, sin, None

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return (
            f"{self.dim}, max_positions={self.max_positions}, base={self.base}{scaling}, "
            f"interleaved={self.interleaved}, backend={describe(self.backends)}"
        )


def _rows(start: int, stop: int, length: int, rotary_dim: int, base: float, scaling: Any) -> tuple[Tensor, Tensor]:
    return rope_rows(rotary_dim, start, stop, length, base, None if scaling is None else RopeScaling(**scaling))


PositionTables.builders[RotaryEmbedding.kind] = _rows
