"""Positions other than rotary ones: slopes of ALiBi, and the sinusoidal table."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_int, check_positive, device_or_default
from foundry_kernels.nn._tables import FixedTables, PositionTables


def alibi_slopes(n_heads: int, *, device: Any = None) -> Tensor:
    """Slopes of ALiBi for `n_heads` heads, ``[H]`` float32, as :func:`foundry_kernels.flash_attention` takes them.

    Of n heads, n a power of two, head i from 1 has the slope ``2^(-8 i / n)``. For any other n, the slopes of the next
    smaller power of two come first, followed by every second slope of the next larger one, as in the authors' code and
    in BLOOM.

    Raises:
        TypeError, ValueError: `n_heads` is no int, or below 1.

    Press et al., "Train Short, Test Long", 2021, arXiv:2108.12409.
    """
    check_int("n_heads", n_heads, minimum=1)
    below = 1 << (n_heads.bit_length() - 1)
    exponents = [8.0 * i / below for i in range(1, below + 1)]
    exponents += [4.0 * i / below for i in range(1, 2 * (n_heads - below), 2)]
    slopes = torch.tensor(exponents, dtype=torch.float64, device="cpu").neg().exp2().float()
    return slopes.to(device_or_default(device))


class AlibiSlopes(FixedTables):
    """The slopes of ALiBi as a module, which layers may share: a buffer `slopes` ``[H]`` outside the state dict.

    Args:
        n_heads: query heads.
        scale: None, or what the slopes are multiplied by once they are rounded to bfloat16, as Falcon has them.
    """

    slopes: Tensor
    names = ("slopes",)

    def __init__(self, n_heads: int, *, scale: float | None = None, device: Any = None) -> None:
        super().__init__()
        if scale is not None:
            check_positive("scale", scale)
        self.n_heads, self.scale = n_heads, scale
        self._register(device)

    def _tables(self, device: Any) -> tuple[Tensor, ...]:
        slopes = alibi_slopes(self.n_heads, device=device)
        return (slopes if self.scale is None else slopes.bfloat16().float() * self.scale,)

    def extra_repr(self) -> str:
        return f"{self.n_heads}" if self.scale is None else f"{self.n_heads}, scale={self.scale}"


class SinusoidalEmbedding(PositionTables):
    """Adds to position p the row ``sin(p f_0), cos(p f_0), sin(p f_1), ...``, ``f_i = base^(-2i / dim)``.

    The table `weight` ``[P, dim]`` is a float32 buffer outside the state dict. It has `max_positions` rows at first and
    grows with the positions that are asked for; `reserve(n)` makes it grow at once.

    Args:
        dim: width of the embeddings.
        max_positions: rows of the table at first.
        base: of the geometric series of wavelengths.

    Raises:
        TypeError, ValueError: a size is no int, or below 1.

    Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762.
    """

    weight: Tensor
    names = ("weight",)
    kind = "sinusoidal"

    def __init__(self, dim: int, max_positions: int, *, base: float = 10000.0, device: Any = None) -> None:
        super().__init__()
        check_int("dim", dim, minimum=1)
        check_int("max_positions", max_positions, minimum=1)
        check_positive("base", base)
        self.dim, self.max_positions, self.base = dim, max_positions, base
        self._register(device)

    def _recipe(self) -> dict[str, Any]:
        return {"dim": self.dim, "base": self.base}

    def forward(self, x: Tensor, start: int = 0, positions: Tensor | None = None, end: int | None = None) -> Tensor:
        """x ``[B, T, dim]`` of the positions from `start` on, with the rows of the table added; or of `positions`, a
        tensor ``[T]`` of integers, all below `end`: `end` is required on a GPU and under torch.compile if some
        positions are beyond the table's rows (on a GPU, a position beyond them is a device-side assertion).

        Raises:
            ValueError: positions below 0.
        """
        if positions is not None:
            return x + self.tables_for(positions, end)[0][positions].to(x.dtype)
        return x + self.rows(start, start + x.shape[1])[0].to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, max_positions={self.max_positions}, base={self.base}"


def _sinusoids(start: int, stop: int, length: int, dim: int, base: float) -> tuple[Tensor]:
    even = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu")
    position = torch.arange(start, stop, dtype=torch.float64, device="cpu")
    angles = position[:, None] * base ** (-even / dim)
    return (torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :dim].float(),)


PositionTables.builders[SinusoidalEmbedding.kind] = _sinusoids
