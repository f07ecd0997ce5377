"""Draws a page of recorded health: heat maps over layers and heads, curves over layers, and chosen attention maps."""

from __future__ import annotations

import json
import math
import textwrap
from pathlib import Path
from typing import Any

from torch import Tensor

from foundry_kernels.diagnostics.health import Health, plain
from foundry_kernels.diagnostics.pictures._figure import require_matplotlib

#: The heat maps: a field of `LayerHealth`, its title, and the range of its colours (None: the data's range).
_GRIDS = (
    ("entropy", "entropy of attention, of the largest", 0.0, 1.0),
    ("max_logit", "largest logit", None, None),
    ("qk_rank", r"effective rank of $W_q^T W_k$", 0.0, None),
)


def write_json(path: Path, health: Health, about: dict[str, Any]) -> None:
    """Writes the layers, the concerns and `about`. Numbers that are not finite become null, because JSON has no
    others."""
    path.write_text(json.dumps(plain({**about, **health.as_dict()}), indent=1) + "\n")


def write_png(path: Path, health: Health, maps: dict[tuple[int, int], Tensor], title: str) -> None:
    """
    Raises:
        MissingMatplotlib: matplotlib does not import.
    """
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    columns = max(len(_GRIDS), 2)
    rows = 2 + math.ceil(len(maps) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4.2 * columns, 3.4 * rows), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for axis, (name, heading, low, high) in zip(axes[0], _GRIDS, strict=False):
        values = [getattr(layer, name) for layer in health.layers]
        image = axis.imshow(values, aspect="auto", vmin=low, vmax=health.head_dim if name == "qk_rank" else high)
        axis.set(title=heading, xlabel="head", ylabel="layer")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure.colorbar(image, ax=axis)
    numbers = range(len(health.layers))
    curves: tuple[tuple[str, list[Any], str], ...] = (
        ("effective rank of activations", [layer.activation_rank for layer in health.layers], "linear"),
        ("norm of gradients", [layer.gradient_norm for layer in health.layers], "log"),
    )
    for axis, (heading, values, scale) in zip(axes[1], curves, strict=False):
        if None in values:
            axis.set_axis_off()
            continue
        axis.plot(numbers, values, marker=".")
        axis.set(title=heading, xlabel="layer", yscale=scale)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(alpha=0.25)
    concerns = axes[1][len(curves)]
    concerns.set_axis_off()
    lines = health.concerns() or ["nothing to worry about"]
    shown = lines[:12] + ([f"and {len(lines) - 12} more"] if len(lines) > 12 else [])
    text = "\n".join(textwrap.fill(line, 60, subsequent_indent="    ") for line in shown)
    concerns.text(0.0, 1.0, text, va="top", fontsize=8, transform=concerns.transAxes)
    rest = axes[2:].flat if rows > 2 else ()
    pictures = iter(maps.items())
    for axis in rest:
        (layer, head), weights = next(pictures, ((-1, -1), None))
        if weights is None:
            axis.set_axis_off()
            continue
        axis.imshow(weights.tolist(), aspect="auto", vmin=0.0)
        axis.set(title=f"attention of layer {layer}, head {head}", xlabel="key", ylabel="query")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
