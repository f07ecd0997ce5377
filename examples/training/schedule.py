"""The learning rate of `train.py` over the steps, as numbers and as a picture."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from examples.training.optimizer import make_optimizer, make_schedule


def learning_rates(lr: float, steps: int) -> list[float]:
    """The learning rate of each step, by stepping the schedule."""
    optimizer = make_optimizer(nn.Linear(1, 1, device="cpu"), lr)
    schedule = make_schedule(optimizer, steps)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return rates


def plot_schedule(rates: list[float], path: Path) -> str | None:
    """Saves the learning rate of each step as a picture. Returns the reason if this is not possible."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        return f"no plot: matplotlib does not import ({error})"
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axis = figure.subplots()
    peak, last = max(rates), rates[-1]
    warm_up = next(step for step, rate in enumerate(rates, 1) if rate > 0.999 * peak)
    axis.plot(range(1, len(rates) + 1), rates)
    axis.axvline(warm_up, color="grey", linewidth=0.8, linestyle="--")
    axis.annotate(f"peak {peak:g}, step {warm_up}", (warm_up, peak), (4, 5), textcoords="offset points")
    axis.annotate(f"end {last:.3g}", (len(rates), last), (0, 14), textcoords="offset points", ha="right")
    axis.set(xlabel="step", ylabel="learning rate", ylim=(0.0, 1.15 * peak))
    axis.set_title(f"learning rate of {len(rates):,} steps", fontsize=11)
    axis.grid(alpha=0.25)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:  # ValueError: matplotlib does not support the format
        return f"no plot: cannot write {path}: {error}"
    return None
