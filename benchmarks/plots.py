"""SVG pictures of stored results: speed-ups, TFLOP/s and memory over tokens, bandwidth over width, rooflines."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from benchmarks.tables import LIMITS, OURS, forward, rival

Row = dict[str, Any]


def draw(kept: dict[str, Any], source: Path) -> list[tuple[str, Path]]:
    """Draws the pictures for which there are rows. Returns titles and files, which are named after the results."""
    drawn = []
    # Text as text instead of outlines takes a fifth of the size.
    with matplotlib.rc_context({"svg.hashsalt": source.stem, "svg.fonttype": "none", "font.size": 9}):
        for title, name, panels, paint in _KINDS:
            found = panels(kept)
            if not found:
                continue
            figure = Figure(figsize=(max(4.6 * len(found), 6.5), 3.6), layout="constrained")
            for axes, panel in zip(figure.subplots(1, len(found), squeeze=False)[0], found, strict=True):
                paint(axes, panel)
                axes.grid(alpha=0.25)
                axes.minorticks_off()
                axes.legend(fontsize=7)
            figure.suptitle(f"{title}: {kept['device']}, torch {kept['environment']['torch']}, {kept['date']}")
            path = _path(source, name)
            figure.savefig(path, metadata={"Date": None})
            path.write_text(_rounded(path.read_text(encoding="utf-8")), encoding="utf-8")
            drawn.append((title, path))
    return drawn


def _rounded(svg: str) -> str:
    """Returns the picture with coordinates rounded to 0.01 points, and without indentation, comments and ids."""
    svg = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), svg)
    return re.sub(
        r"\n +(?=<)| *<!--.*?-->| id=\"(?:text|line2d|patch|[xy]tick|axes|figure|legend|matplotlib)[.\w]*\"", "", svg
    )


def names(kept: dict[str, Any], source: Path) -> list[tuple[str, Path]]:
    """Returns the result of `draw` without drawing."""
    return [(title, _path(source, name)) for title, name, panels, _ in _KINDS if panels(kept)]


def _path(source: Path, name: str) -> Path:
    return source.with_name(f"{source.stem}-{name}.svg")


def _scaling(kept: dict[str, Any], axis: str, key: str, products: bool) -> list[Row]:
    """Rows along `axis` whose lines have `key`, with or without matmuls."""
    found = [r for r in kept["rows"] if r.get("kind") == "scaling" and r["axis"] == axis]
    found = [r for r in found if any(any(line.get(key, ())) for line in r["lines"].values())]
    return [r for r in found if products == any("TFLOP/s" in line for n, line in r["lines"].items() if n in OURS)]


def _widths(kept: dict[str, Any]) -> list[Row]:
    return [r for r in _scaling(kept, "N", "GB/s", False) if r["direction"] == "forward"][:4]


def _tokens(kept: dict[str, Any]) -> list[Row]:
    return [r for r in _scaling(kept, "T", "TFLOP/s", True) if r["direction"] in ("forward", "backward")][:4]


def _speedups(kept: dict[str, Any]) -> list[list[tuple[str, float, float | None]]]:
    """Returns the speed-up of each operation over eager and over its rival, in the dtype with the most of them."""
    by_dtype: dict[str, list[tuple[str, float, float | None]]] = {}
    for op, rows in forward(kept).items():
        for dtype, row in rows.items():
            if (eager := row.get("speedup_over", {}).get("eager")) is not None:
                by_dtype.setdefault(dtype, []).append((op, eager, row["speedup_over"].get(rival(row))))
    return [max(by_dtype.values(), key=len)] if by_dtype else []


def _bars(axes: Any, found: list[tuple[str, float, float | None]]) -> None:
    found = sorted(found, key=lambda one: one[1])
    heights = range(len(found))
    axes.barh([h + 0.2 for h in heights], [one[1] for one in found], 0.4, label="than plain PyTorch")
    axes.barh([h - 0.2 for h in heights], [one[2] or 0.0 for one in found], 0.4, label="than torch.compile, or SDPA")
    axes.axvline(1.0, linestyle="--", color="gray", linewidth=1.0)
    axes.set_yticks(list(heights), [one[0] for one in found])
    axes.set(xlabel="times faster", xscale="log")
    axes.set_xticks([0.5, 1, 2, 4, 8, 16], ["0.5", "1", "2", "4", "8", "16"])


def _lines(axes: Any, row: Row, key: str, scale: float = 1.0) -> None:
    for name, line in row["lines"].items():
        known = [(x, y * scale) for x, y in zip(row["sizes"], line.get(key, ()), strict=False) if y]
        if known:
            style = {"linestyle": "--", "color": "gray"} if name in LIMITS else {"marker": "o", "markersize": 3}
            axes.plot(*zip(*known, strict=True), label=name, linewidth=2.2 if name in OURS else 1.0, **style)
    axes.set_xscale("log", base=2)
    axes.set_title(f"{row['op']} {row['direction']}, {row['dtype']}", fontsize=9)


def _bandwidth(axes: Any, row: Row) -> None:
    _lines(axes, row, "GB/s")
    axes.set(xlabel="width", ylabel="GB/s", ylim=(0, None))


def _rate(axes: Any, row: Row) -> None:
    _lines(axes, row, "TFLOP/s")
    limit = row["lines"].get("GEMM", {}).get("TFLOP/s", ())
    if any(limit):
        axes.axhline(max(filter(None, limit)), linestyle="--", color="gray", linewidth=1.0)
    axes.set(xlabel="tokens", ylabel="TFLOP/s", ylim=(0, None))


def _memory(axes: Any, row: Row) -> None:
    _lines(axes, {**row, "lines": {n: v for n, v in row["lines"].items() if n not in LIMITS}}, "peak_bytes", 1e-6)
    axes.set(xlabel="tokens", ylabel="peak MB beyond the inputs")
    axes.set_yscale("log")


def _roofs(kept: dict[str, Any]) -> list[list[Row]]:
    """Returns for each dtype the rows of operations with matmuls, and the rows of the two limits."""
    rows = [r for r in kept["rows"] if r.get("kind", "op") == "op"]
    panels = []
    for dtype in dict.fromkeys(r["dtype"] for r in rows):
        points = [r for r in rows if r["dtype"] == dtype and r.get("TFLOP/s") and r.get("GB/s")]
        roofs = [r for r in rows if r["dtype"] == dtype and r["row"] in ("GEMM", "memcpy") and r["memory"] == "cold"]
        if points and {r["row"] for r in roofs} == {"GEMM", "memcpy"}:
            panels.append(points + roofs)
    return panels


def _roofline(axes: Any, rows: list[Row]) -> None:
    top = max(r["TFLOP/s"] for r in rows if r["row"] == "GEMM")
    slope = max(r["GB/s"] for r in rows if r["row"] == "memcpy") / 1e3  # TFLOP/s at an intensity of 1 operation a byte
    points = [r for r in rows if r["row"] not in LIMITS]
    at = {id(r): r["TFLOP/s"] * 1e3 / r["GB/s"] for r in points}
    low, high = min(at.values()) / 2, max([*at.values(), 2 * top / slope]) * 2
    axes.plot([low, top / slope, high], [low * slope, top, top], color="gray", linestyle="--", label="memcpy, GEMM")
    for name in dict.fromkeys(r["row"] for r in points):
        of_name = [r for r in points if r["row"] == name]
        marker = "o" if name in OURS else "x"
        axes.plot([at[id(r)] for r in of_name], [r["TFLOP/s"] for r in of_name], marker, markersize=4, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(f"{', '.join(dict.fromkeys(r['op'] for r in points))}, {rows[0]['dtype']}", fontsize=9)
    axes.set(xlabel="operations of matrix products a byte", ylabel="TFLOP/s")


_Panels = Callable[[dict[str, Any]], list[Any]]
_Paint = Callable[[Any, Any], None]
#: Title, name of the file, function for the panels, function for drawing one. README.md shows the first existing one.
_KINDS: tuple[tuple[str, str, _Panels, _Paint], ...] = (
    ("How many times faster, forward", "speedups", _speedups, _bars),
    ("TFLOP/s over tokens", "tflops", _tokens, _rate),
    ("Bandwidth over width", "bandwidth", _widths, _bandwidth),
    ("Memory over tokens", "memory", _tokens, _memory),
    ("Roofline", "roofline", _roofs, _roofline),
)
