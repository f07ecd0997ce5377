"""The health of a model over a whole run: its changes, and a picture over the steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from foundry_kernels.diagnostics.health import RANK_KEPT, Health, LayerHealth


class HealthHistory:
    """The health of one model at several steps of its training.

        history = HealthHistory()
        history.append(step, recorder.health())
        print("\\n".join(history.concerns()))  # at the last step, and since the first

    Attributes:
        steps: the numbers of the steps, in increasing order.
        healths: the health at each step.
    """

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.healths: list[Health] = []

    def append(self, step: int, health: Health) -> None:
        """Adds the health at a step.

        Raises:
            ValueError: the step is not after the last one, or the health is of another model.
        """
        if self.steps and step <= self.steps[-1]:
            raise ValueError(f"step must be above the last one, {self.steps[-1]}; got {step}")
        if self.healths:
            health.check_same_model(self.healths[0])
        self.steps.append(step)
        self.healths.append(health)

    def concerns(self, *, rank_kept: float = RANK_KEPT) -> list[str]:
        """Returns the concerns about the last health, including changes since the first one.

        Args:
            rank_kept: as for :meth:`Health.concerns`.
        """
        return self.healths[-1].concerns(since=self.healths[0], rank_kept=rank_kept) if self.healths else []

    def __len__(self) -> int:
        return len(self.steps)


def _mean(values: list[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def _least(values: list[float]) -> float:
    return min(values, default=math.nan)


#: The panels: title, value for a layer, and scale of the axis.
_PANELS: tuple[tuple[str, Callable[[LayerHealth], float | None], str], ...] = (
    ("entropy of attention, of the largest; mean of heads", lambda layer: _mean(layer.entropy), "linear"),
    ("largest logit of all heads", lambda layer: max(layer.max_logit, default=math.nan), "linear"),
    ("effective rank of activations", lambda layer: layer.activation_rank, "linear"),
    ("effective rank of queries times keys; least of heads", lambda layer: _least(layer.qk_rank), "linear"),
    ("norm of gradients, attention", lambda layer: layer.attention_gradient_norm, "log"),
    ("norm of gradients, feed-forward", lambda layer: layer.feed_forward_gradient_norm, "log"),
)


def write_history_png(
    path: Path, history: HealthHistory, curves: Mapping[str, Mapping[int, float]], title: str = ""
) -> None:
    """Draws the health over the steps, with one line for each layer, below curves of the run such as loss and learning
    rate.

    Args:
        curves: the panels above: values by step, by title.

    Raises:
        ImportError: matplotlib does not import; the message says how to install it.
        ValueError: the history is empty.
    """
    if not len(history):
        raise ValueError("history must have the health of at least one step; it is empty")
    from foundry_kernels.diagnostics.pictures._figure import require_matplotlib

    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import colormaps, pyplot
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import BoundaryNorm
    from matplotlib.ticker import MaxNLocator

    layers = len(history.healths[0].layers)
    colours = colormaps["viridis"].resampled(max(2, layers))
    rows = math.ceil((len(curves) + len(_PANELS)) / 2)
    figure, axes = pyplot.subplots(
        rows, 2, figsize=(11.0, 2.5 * rows), sharex=True, squeeze=False, layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    panels = list(axes.flat)
    for axis, (heading, values) in zip(panels, curves.items(), strict=False):
        axis.plot(list(values), list(values.values()), linewidth=1.0, color="black")
        axis.set_title(heading, fontsize=9)
    for axis, (heading, value, scale) in zip(panels[len(curves) :], _PANELS, strict=False):
        drawn = False
        for number in range(layers):
            line = [_number(value(health.layers[number])) for health in history.healths]
            known = [y for y in line if math.isfinite(y) and (scale == "linear" or y > 0.0)]
            drawn = drawn or bool(known)
            axis.plot(history.steps, line, linewidth=1.2, marker=".", markersize=3, color=colours(number))
        if drawn:
            axis.set_yscale(scale)
        else:
            axis.text(0.5, 0.5, "not recorded", ha="center", transform=axis.transAxes, fontsize=8)
        axis.set_title(heading, fontsize=9)
    for axis in panels:
        axis.grid(alpha=0.25)
    for axis in panels[len(curves) + len(_PANELS) :]:
        axis.set_axis_off()
    for axis in axes[-1]:
        axis.set_xlabel("step")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    norm = BoundaryNorm([n - 0.5 for n in range(layers + 1)], colours.N) if layers > 1 else None
    if norm is not None:
        ticks = MaxNLocator(min(layers, 8), integer=True)
        figure.colorbar(ScalarMappable(norm, colours), ax=axes, ticks=ticks, label="layer", fraction=0.02, aspect=60)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _number(value: float | None) -> Any:
    return math.nan if value is None else value
