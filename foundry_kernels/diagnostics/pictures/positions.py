"""Pictures of position tables and biases, from the functions that models use."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from foundry_kernels.core.checks import check_int
from foundry_kernels.diagnostics.pictures._figure import heat_map, make_figure
from foundry_kernels.diagnostics.pictures.attention import hide_unseen
from foundry_kernels.nn import SinusoidalEmbedding, alibi_slopes
from foundry_kernels.ops.rope import RopeScaling, rope, rope_table


def sinusoidal(dim: int = 128, positions: int = 128, *, base: float = 10000.0) -> Any:
    """Draws the sinusoidal table (:class:`foundry_kernels.nn.SinusoidalEmbedding`) and the cosine similarity of its
    rows, which depends only on their distance.

    Args:
        dim, positions, base: the table's.
    """
    table = SinusoidalEmbedding(dim, positions, base=base, device="cpu").weight
    figure, (axes,) = make_figure(
        1, 2, 11.5, 4.6, f"sinusoidal positions: {positions} positions, {dim} dimensions, base {base:g}"
    )
    image = heat_map(axes[0], table, -1.0, 1.0, aspect="auto")
    axes[0].set(title="the table: even dimensions sin, odd cos", xlabel="dimension", ylabel="position")
    figure.colorbar(image, ax=axes[0])
    rows = F.normalize(table, dim=-1)
    image = heat_map(axes[1], rows @ rows.T, None, 1.0)
    axes[1].set(title="cosine similarity of two positions", xlabel="position", ylabel="position")
    figure.colorbar(image, ax=axes[1])
    return figure


def rotary_scores(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """Returns the score ``[P]`` of a query ``[R]`` at position d with a key ``[R]`` at position 0, for all distances d
    of tables ``[P, R/2]``: ``rope(q) . rope(k) / sqrt(R)``."""
    count, width = cos.shape[0], q.shape[-1]
    queries, keys = q.expand(1, 1, count, width), k.expand(1, 1, count, width)
    rotated, _ = rope(queries, keys, cos, sin, backend="reference")
    _, first = rope(queries[:, :, :1], keys[:, :, :1], cos[:1], sin[:1], backend="reference")
    return (rotated[0, 0] @ first[0, 0, 0]) / math.sqrt(width)


def rotary(
    dim: int = 64,
    positions: int = 256,
    *,
    base: float = 10000.0,
    scalings: Mapping[str, RopeScaling] | None = None,
    seed: int = 0,
) -> Any:
    """Draws cos and sin of the rotary table (:func:`foundry_kernels.rope_table`) by position and pair of dimensions,
    and scores over the distance, for q = k = (1, ..., 1) and for a random query and key.

    Args:
        dim: rotated dimensions R of a head.
        positions: rows of the table.
        base: the base of the wavelengths (`rope_theta`).
        scalings: by name; each is drawn below the plain table.
        seed: the seed of the random query and key.
    """
    check_int("positions", positions, minimum=1)
    every: dict[str, RopeScaling | None] = {"no scaling": None, **(scalings or {})}
    figure, axes = make_figure(
        len(every), 3, 13.0, 0.8 + 2.9 * len(every), f"rotary positions: {dim} dimensions of a head, base {base:g}",
        sharex="col", sharey="col",
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, dim, generator=generator)
    for row, (name, scaling) in zip(axes, every.items(), strict=True):
        cos, sin = rope_table(dim, positions, base=base, scaling=scaling, device="cpu")
        high = float(max(cos.abs().max(), sin.abs().max(), torch.ones(())))
        for axis, table, heading in zip(row, (cos, sin), ("cos", "sin"), strict=False):
            image = heat_map(axis, table, -high, high, aspect="auto")
            axis.set_title(f"{heading}, {name}", fontsize=10)
            axis.set_ylabel("position")
            figure.colorbar(image, ax=axis)
        for (q, k), label in (((torch.ones(dim),) * 2, "q = k = (1, ..., 1)"), (drawn, "random q and k")):
            row[2].plot(rotary_scores(cos, sin, q, k).tolist(), label=label, linewidth=1.2)
        row[2].axhline(0.0, color="black", linewidth=0.6)
        row[2].set_title(f"score, {name}", fontsize=10)
        row[2].set_ylabel(r"$q \cdot k\,/\,\sqrt{D}$")
        row[2].grid(alpha=0.25)
    for axis, label in zip(axes[-1], ("pair of dimensions", "pair of dimensions", "distance"), strict=True):
        axis.set_xlabel(label)
    axes[0, 2].legend(fontsize=8, loc="upper right")
    return figure


def alibi(n_heads: int = 8, positions: int = 32, *, heads: Sequence[int] | None = None) -> Any:
    """Draws ALiBi's bias of causal attention in some heads, ``-slope (i - j)`` for query i and key j, with the same
    colour scale, and the slopes of all heads (:func:`foundry_kernels.nn.alibi_slopes`).

    Args:
        n_heads: the model's number of heads.
        positions: number of tokens.
        heads: heads to draw, preferably at most four; None is the first, the one after a quarter, and the last.

    Raises:
        ValueError: a head does not exist, or there are no positions.
    """
    slopes = alibi_slopes(n_heads, device="cpu")
    check_int("positions", positions, minimum=1)
    heads = sorted({0, n_heads // 4, n_heads - 1}) if heads is None else list(heads)
    if not heads or not all(0 <= head < n_heads for head in heads):
        raise ValueError(f"heads must be numbers of heads from 0 to {n_heads - 1}; got {heads}")
    panels, title = len(heads) + 1, f"ALiBi: the bias that is added to scores, {n_heads} heads"
    figure, (axes,) = make_figure(1, panels, 3.2 * panels + 0.8, 3.6, title)
    place = torch.arange(positions)
    distance = (place[:, None] - place).float()
    lowest = -float(slopes[heads].max()) * max(1, positions - 1)
    for axis, head in zip(axes, heads, strict=False):
        bias = hide_unseen(-slopes[head] * distance, causal=True)
        image = heat_map(axis, bias, lowest, 0.0)
        axis.set(title=f"head {head}, slope {slopes[head]:.3g}", xlabel="key", ylabel="query")
    figure.colorbar(image, ax=axes[:-1], shrink=0.8, label="bias")
    axes[-1].plot(range(n_heads), slopes.tolist(), marker="o", markersize=4)
    axes[-1].set(title="slope by head", xlabel="head")
    axes[-1].set_yscale("log", base=2)
    axes[-1].grid(alpha=0.25)
    from matplotlib.ticker import MaxNLocator

    for axis in axes:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure
