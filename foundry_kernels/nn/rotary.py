"""Rotary position embedding as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from foundry_kernels.nn._backend import Backend, describe, plan
from foundry_kernels.nn._tables import FixedTables
from foundry_kernels.ops.rope import RopeScaling, rope, rope_table


class RotaryEmbedding(FixedTables):
    """Rotates queries and keys by their positions; see :func:`foundry_kernels.rope`.

    The tables `cos` and `sin`, ``[max_positions, dim / 2]``, are buffers outside the state dict. They follow the module
    to another device, but stay float32 under ``.to(torch.bfloat16)`` and the like: bfloat16 has 8 bits of precision,
    too few to tell the angles of neighbouring positions apart. Built on the meta device, they get their values with
    ``to_empty(device=...)``.

    Args:
        dim: the rotary dimensions of a head, even; a head's other dimensions are copied.
        max_positions: rows of the tables.
        base: of the geometric series of wavelengths.
        scaling: None, or a :class:`foundry_kernels.RopeScaling`.
        interleaved: False pairs ``(i, i + dim/2)`` (Hugging Face's Llama), True ``(2i, 2i+1)`` (Meta's Llama).
        backend: a backend's name, or a mapping of operations to names.

    Raises:
        ValueError: `dim` is odd or below 2, `max_positions` below 1, an unknown backend.
    """

    cos: Tensor
    sin: Tensor
    names = ("cos", "sin")

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
        if dim < 2 or dim % 2:
            raise ValueError(f"dim must be even and at least 2; got {dim}")
        if max_positions < 1:
            raise ValueError(f"max_positions must be at least 1; got {max_positions}")
        self.backends = plan(backend, ("rope",))
        self.dim, self.max_positions, self.base, self.scaling = dim, max_positions, base, scaling
        self.interleaved = interleaved
        self._register(device)

    def _tables(self, device: Any) -> tuple[Tensor, Tensor]:
        return rope_table(self.dim, self.max_positions, base=self.base, scaling=self.scaling, device=device)

    def forward(self, q: Tensor, k: Tensor, positions: Tensor | int | None = None) -> tuple[Tensor, Tensor]:
        """Rotate q ``[B, H, T, D]`` and k ``[B, Hk, T, D]``, ``D >= dim``.

        Args:
            positions: None for 0 .. T-1; an int for the position of the first token; or an integer tensor ``[B, T]``
                or ``[T]``.

        Raises:
            ValueError: positions beyond `max_positions`, or the operation's own conditions.
        """
        cos, sin, positions = self.rows(q.shape[-2], positions)
        interleaved, backend = self.interleaved, self.backends["rope"]
        return rope(q, k, cos, sin, interleaved=interleaved, positions=positions, backend=backend)

    def rows(self, length: int, positions: Tensor | int | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """cos, sin and positions of `length` tokens, as :func:`foundry_kernels.rope` takes them.

        Raises:
            ValueError: positions beyond `max_positions`.
        """
        if isinstance(positions, Tensor):
            return self.cos, self.sin, positions
        start = 0 if positions is None else positions
        self.check_positions(start, start + length)
        return self.cos[start : start + length], self.sin[start : start + length], None

    def check_positions(self, start: int, end: int) -> None:
        """Raise ValueError unless the tables have a row for each position from `start` to before `end`."""
        if start < 0 or end > self.max_positions:
            raise ValueError(f"positions {start} to {end - 1} do not fit max_positions={self.max_positions}")

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return (
            f"{self.dim}, max_positions={self.max_positions}, base={self.base}{scaling}, "
            f"interleaved={self.interleaved}, backend={describe(self.backends)}"
        )
