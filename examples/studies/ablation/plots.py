"""The pictures of the report; needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def variants(results: dict[str, Any], path: Path) -> None:
    """Losses of the seeds, times, memory and cache, one row per variant."""
    names = list(results["runs"])
    labels = [results["titles"][name] for name in names]
    speed = results["speed"]
    panels: list[tuple[str, list[list[float]], bool]] = [
        ("held-out loss, nats a byte", [[r["held_out"] for r in results["runs"][n].values()] for n in names], False)
    ]
    if speed:
        measured = all(n in speed.get(part, {}) for n in names for part in ("step", "token", "memory"))
        if measured:
            panels += [
                ("ms a step", [[speed["step"][n]["ms"]] for n in names], True),
                ("ms a token", [[speed["token"][n]["ms"]] for n in names], True),
                ("peak MB of a step", [[speed["memory"][n]["peak_bytes"] / 1e6] for n in names], True),
                ("cache bytes a token", [[speed["memory"][n]["cache_bytes_a_token"]] for n in names], True),
            ]
    figure, axes = pyplot.subplots(
        1, len(panels), sharey=True, squeeze=False, figsize=(3.2 + 2.6 * len(panels), 0.8 + 0.34 * len(names)),
        layout="constrained",
    )  # fmt: skip
    for axis, (heading, values, bars) in zip(axes[0], panels, strict=True):
        for row, found in enumerate(values):
            if bars:
                axis.barh(row, found[0], height=0.6, color=_color(names[row]))
            else:
                axis.plot(found, [row] * len(found), "o", color=_color(names[row]), alpha=0.8)
        axis.set_title(heading, fontsize=10)
        axis.grid(alpha=0.25, axis="x")
    axes[0, 0].set_yticks(range(len(names)), labels)
    axes[0, 0].invert_yaxis()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def curves(results: dict[str, Any], path: Path) -> None:
    """Loss of the first seed over the tokens read, as means over steps."""
    settings = results["settings"]
    tokens = settings["batch"] * settings["seq_len"] / 1e6
    figure, axis = pyplot.subplots(figsize=(7.5, 4.5), layout="constrained")
    for name, runs in results["runs"].items():
        curve = next(iter(runs.values()))["curve"]
        style = "--" if name.startswith("gpt2+") else ":" if name.startswith("llama-") else "-"
        axis.plot([tokens * c[0] for c in curve], [c[1] for c in curve], style, label=results["titles"][name])
    axis.set(xlabel="million bytes read", ylabel="loss, nats a byte")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def extrapolation(results: dict[str, Any], path: Path) -> None:
    """Perplexity over the window length, one line per kind of positions."""
    figure, axis = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
    for name, row in results["rows"].items():
        known = {int(length): of["perplexity"] for length, of in row["lengths"].items() if of is not None}
        style = "--" if "scaled" in row["kind"] else "-"
        axis.plot(list(known), list(known.values()), style, marker=".", label=name)
    axis.axvline(results["trained"], color="grey", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(results["lengths"], [str(length) for length in results["lengths"]])
    axis.set(xlabel="tokens of a window (the line: as trained)", ylabel="perplexity a byte")
    axis.grid(alpha=0.25, which="both")
    axis.legend(fontsize=8, loc="upper center")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _color(name: str) -> str:
    return "tab:blue" if name.startswith("gpt2") else "tab:orange"
