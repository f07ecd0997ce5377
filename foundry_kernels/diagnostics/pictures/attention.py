"""Attention maps with tokens on both axes: one head, all heads, or causal next to bidirectional."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from foundry_kernels.core.checks import check_float, check_rank
from foundry_kernels.diagnostics.pictures._figure import LABELS, drawable, heat_map, make_figure

#: With at most this many tokens each has a label; with more, the axes have their numbers.
_MOST_LABELS = 96


def hide_unseen(weights: Tensor, causal: bool = False, window: int | None = None) -> Tensor:
    """Returns the weights ``[..., T, S]`` with NaN where a query does not see the key, according to `causal` and
    `sliding_window` of :class:`foundry_kernels.nn.Attention`. The last query has the position of the last key."""
    length, keys = weights.shape[-2:]
    place = torch.arange(keys - length, keys, device=weights.device)
    distance = place[:, None] - torch.arange(keys, device=weights.device)
    hidden = (distance < 0) & causal
    if window is not None:
        hidden = hidden | (distance.abs() >= window)
    return weights.masked_fill(hidden, math.nan)


def attention_map(
    weights: Tensor,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    *,
    causal: bool = False,
    window: int | None = None,
    title: str | None = None,
) -> Any:
    """Draws the attention weights of each query.

    Args:
        weights: ``[T, S]``, rows of the softmax.
        queries: the labels of the T queries, from the top; None numbers them.
        keys: the labels of the S keys, from the left; None uses the queries' labels if T is S.
        causal, window: cells with keys that a query does not see are blank.
        title: the title, such as the model, the layer and the head.

    Raises:
        TypeError, ValueError: weights of another rank, or the wrong number of labels.
        MissingMatplotlib: matplotlib does not import.
    """
    _check_maps("weights", weights, 2, queries, keys)
    side = _side(max(weights.shape))
    keys = queries if keys is None and weights.shape[0] == weights.shape[1] else keys
    figure, axes = make_figure(1, 1, side + 1.2, side + 0.3, title)
    image = _labelled(axes[0, 0], hide_unseen(weights, causal, window), queries, keys, None)
    figure.colorbar(image, ax=axes[0, 0], label="weight of attention", shrink=0.8)
    return figure


def causal_and_bidirectional(
    causal: Tensor,
    bidirectional: Tensor,
    tokens: Sequence[str] | None = None,
    *,
    window: int | None = None,
    title: str | None = None,
) -> Any:
    """Draws the weights ``[T, T]`` of one head with and without a causal mask, side by side, with the same colour
    scale.

    Args:
        causal, bidirectional: the weights with and without the mask.
        tokens: labels of both axes; None numbers them.
        window, title: as for :func:`attention_map`.
    """
    for name, weights in (("causal", causal), ("bidirectional", bidirectional)):
        _check_maps(name, weights, 2, tokens, tokens)
    side = _side(max(causal.shape))
    figure, axes = make_figure(1, 2, 2.0 * side + 1.4, side + 0.4, title)
    pair = hide_unseen(causal, True, window), hide_unseen(bidirectional, False, window)
    high = max(float(weights.nan_to_num(0.0).max()) for weights in pair)
    headings = "causal: a token sees itself and those before it", "bidirectional: a token sees all"
    for axis, weights, heading in zip(axes[0], pair, headings, strict=True):
        image = _labelled(axis, weights, tokens, tokens, high)
        axis.set_title(heading, fontsize=10)
    axes[0, 1].set_ylabel("")
    figure.colorbar(image, ax=axes[0], label="weight of attention", shrink=0.8)
    return figure


def attention_grid(
    weights: Tensor, *, causal: bool = False, window: int | None = None, title: str | None = None
) -> Any:
    """Draws all heads, one row for each layer, with the same colour scale. The scale uses square roots, because
    otherwise a head that attends to all tokens would look dark next to one that attends to one token.

    Args:
        weights: ``[n_layers, n_heads, T, S]``.
        causal, window, title: as for :func:`attention_map`.
    """
    _check_maps("weights", weights, 4, None, None)
    n_layers, n_heads, length, keys = weights.shape
    side = max(0.55, min(1.5, 22.0 / max(n_layers, n_heads)))
    width, height = max(4.5, n_heads * side + 1.3), max(2.6, n_layers * side + 0.9)
    figure, axes = make_figure(n_layers, n_heads, width, height, title)
    from matplotlib.colors import PowerNorm

    shown = hide_unseen(weights, causal, window)
    norm = PowerNorm(0.5, vmin=0.0, vmax=1.0)
    for layer in range(n_layers):
        for head in range(n_heads):
            axis = axes[layer, head]
            image = heat_map(axis, shown[layer, head], None, None, norm=norm)
            axis.set(xticks=[], yticks=[])
            if layer == 0:
                axis.set_title(f"head {head}" if n_heads <= 8 else str(head), fontsize=9)
        axes[layer, 0].set_ylabel(f"layer {layer}" if n_layers <= 12 else str(layer), fontsize=9)
    bar = figure.colorbar(image, ax=axes, label="weight of attention", aspect=4.0 * height)
    bar.set_ticks([0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0])
    figure.supxlabel(f"key: {keys} tokens from the left", fontsize=9)
    figure.supylabel(f"query: {length} tokens from the top", fontsize=9)
    return figure


def _side(count: int) -> float:
    """The size in inches of a map of `count` tokens."""
    return max(4.0, min(14.0, 0.21 * count + 1.2))


def _labelled(
    axis: Any, weights: Tensor, queries: Sequence[str] | None, keys: Sequence[str] | None, high: float | None
) -> Any:
    high = max(float(weights.nan_to_num(0.0).max()), 1e-6) if high is None else high
    image = heat_map(axis, weights, 0.0, high)
    size = 8 if max(weights.shape) <= 64 else 6
    for set_ticks, labels, turned in ((axis.set_xticks, keys, 90), (axis.set_yticks, queries, 0)):
        if labels is not None and len(labels) <= _MOST_LABELS:
            shown = [drawable(label if len(label) <= 16 else label[:15] + "…") for label in labels]
            set_ticks(range(len(labels)), shown, fontsize=size, family=LABELS, parse_math=False, rotation=turned)
    axis.set(xlabel="key", ylabel="query")
    return image


def _check_maps(
    name: str, weights: Tensor, rank: int, queries: Sequence[str] | None, keys: Sequence[str] | None
) -> None:
    check_float(name, weights)
    check_rank(name, weights, rank, "[T, S]" if rank == 2 else "[n_layers, n_heads, T, S]")
    if not weights.numel():
        raise ValueError(f"{name} must not be empty; got shape {tuple(weights.shape)}")
    for of, labels, count in (("queries", queries, weights.shape[-2]), ("keys", keys, weights.shape[-1])):
        if labels is not None and len(labels) != count:
            raise ValueError(f"{of} must have a label for each of {count} tokens; got {len(labels)}")
