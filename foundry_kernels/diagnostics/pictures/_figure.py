"""Shared code of the pictures. It does not use matplotlib's global state: no pyplot, and no backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

#: Its lightness increases evenly, so that a picture can be printed in grey.
COLORS = "viridis"
#: For cells without a value, such as keys that a query does not see; not a colour of the scale.
BLANK = "white"
#: The font family of tokens.
LABELS = "monospace"
FORMATS = (".png", ".svg", ".pdf")


class MissingMatplotlib(ImportError):
    """matplotlib, which draws the pictures, is missing."""


def make_figure(rows: int, columns: int, width: float, height: float, title: str | None, **options: Any) -> Any:
    """Returns (figure, axes ``[rows, columns]``), `width` x `height` inches.

    Raises:
        MissingMatplotlib: matplotlib does not import.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=11, parse_math=False, wrap=True)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def require_matplotlib() -> None:
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise MissingMatplotlib(
            f"pictures need matplotlib, which does not import ({error}); pip install 'foundry-kernels[diagnostics]'"
        ) from None


def heat_map(axis: Any, values: Tensor, low: float | None, high: float | None, **options: Any) -> Any:
    """Draws ``[rows, columns]``; NaN stays blank."""
    import matplotlib

    colors = matplotlib.colormaps[COLORS].with_extremes(bad=BLANK)
    shown = values.detach().float().cpu().numpy()
    return axis.imshow(shown, cmap=colors, vmin=low, vmax=high, interpolation="nearest", **options)


def drawable(text: str) -> str:
    """`text` with escapes for the characters that the font of labels does not have."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties(family=LABELS)))
    return "".join(c if font.get_char_index(ord(c)) else ascii(c)[1:-1] for c in text)


def save(figure: Any, path: Path) -> None:
    """Writes PNG, SVG or PDF, depending on the suffix; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
