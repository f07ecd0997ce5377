"""An SVG picture of stored results: how many times faster each operation's forward pass is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.tables import forward, rival


def draw(kept: dict[str, Any], target: Path) -> Path | None:
    """Draws the speed-up of each operation over eager and over its rival, in the dtype with the most of them. Returns
    `target`, or None without rows."""
    by_dtype: dict[str, list[tuple[str, float, float]]] = {}
    for op, rows in forward(kept).items():
        for dtype, row in rows.items():
            over = row.get("speedup_over", {})
            if "eager" in over:
                by_dtype.setdefault(dtype, []).append((op, over["eager"], over.get(rival(row), 0.0)))
    if not by_dtype:
        return None
    most = max(by_dtype.values(), key=lambda bars: len(bars))
    names, eager, rivals = zip(*sorted(most, key=lambda one: one[1]), strict=True)
    # Text as text instead of outlines takes a fifth of the size.
    with matplotlib.rc_context(
        {"svg.hashsalt": target.stem.removesuffix("-speedups"), "svg.fonttype": "none", "font.size": 9}
    ):
        figure = Figure(figsize=(6.5, 3.6), layout="constrained")
        axes = figure.subplots()
        heights = range(len(names))
        axes.barh([h + 0.2 for h in heights], eager, 0.4, label="than plain PyTorch")
        axes.barh([h - 0.2 for h in heights], rivals, 0.4, label="than torch.compile, or SDPA")
        axes.axvline(1.0, linestyle="--", color="gray", linewidth=1.0)
        axes.set_yticks(list(heights), names)
        axes.set(xlabel="times faster", xscale="log")
        axes.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])
        axes.grid(alpha=0.25)
        axes.minorticks_off()
        axes.legend(fontsize=7)
        title = "How many times faster, forward"
        figure.suptitle(f"{title}: {kept['device']}, torch {kept['environment']['torch']}, {kept['date']}")
        figure.savefig(target, metadata={"Date": None})
    target.write_text(_short(target.read_text(encoding="utf-8")), encoding="utf-8")
    return target


def _short(svg: str) -> str:
    """Returns the picture with coordinates rounded to 0.01 points, and without indentation, comments and ids."""
    svg = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), svg)
    return re.sub(
        r"\n +(?=<)| *<!--.*?-->| id=\"(?:text|line2d|patch|[xy]tick|axes|figure|legend|matplotlib)[.\w]*\"", "", svg
    )
