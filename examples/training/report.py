"""The output of `train.py`: header, table, plot, sample."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.training.log import read
from examples.training.loop import END_STEPS, Recipe, Run
from examples.training.options import OWN_OPTIONS
from examples.training.text import BYTES, Bytes, Text
from foundry_kernels.diagnostics import write_history_png
from foundry_kernels.models import GenerationStats, ModelConfig, Transformer

#: The most concerns printed for a run; its log has all of them.
MOST_CONCERNS = 12


def kernels(backends: dict[str, str]) -> str:
    """`native: rms_norm, add_rms_norm · reference: rope` from a map of operations to backends."""
    names = sorted(set(backends.values()), key=lambda name: name == "reference")
    return " · ".join(f"{name}: {', '.join(op for op, b in backends.items() if b == name)}" for name in names)


def header(recipe: Recipe, text: Text, rows: dict[str, str], parameters: int) -> str:
    """`rows` maps each requested backend to its kernels."""
    dtype = str(recipe.dtype).removeprefix("torch.")
    device = str(recipe.device)
    device += f" ({torch.get_num_threads()} threads)" if device == "cpu" else f" ({torch.cuda.get_device_name()})"
    shape, units = recipe.model, f"{text.vocabulary.unit}s"
    lines = {
        "model": f"{parameters / 1e6:.2f} M parameters: {shape.n_layers} layers of width {shape.dim}, "
        f"{shape.n_heads} heads, {shape.kv_heads} key-value heads, {text.vocabulary.description}",
        "text": f"{text.name}: {_count(len(text.train))} {units} to train on, {_count(len(text.held_out))} held out",
        "training": f"{recipe.steps} steps of {recipe.batch} x {recipe.seq_len} {units}, AdamW at {recipe.lr:g}, "
        f"seed {recipe.seed}",
        "device": f"{device}, {dtype}, torch {torch.__version__}",
    }
    if choices := _choices(shape):
        lines["choices"] = choices
    lines |= rows
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def table(runs: list[Run], recipe: Recipe, text: Text) -> str:
    """One row per run; speeds are relative to the first row."""
    end = min(END_STEPS, recipe.steps)
    rows = [["", "loss at", f"loss, last {end}", "held-out", "tokens/s", "", "peak"]]
    rows.append(["backend", "step 1", "steps (mean)", "loss", "(median)", "speed", "memory"])
    base = _speed(runs[0], recipe)
    for run in runs:
        speed = _speed(run, recipe)
        rows.append(
            [
                run.backend,
                f"{run.losses[0]:.5f}",
                f"{run.end_loss:.4f}",
                f"{run.held_out:.4f}",
                f"{speed:,.0f}",
                f"{speed / base:.2f}x",
                f"{run.peak_bytes / 2**20:,.0f} MiB",
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join([row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)])
        for row in rows
    ]
    lines.insert(2, "-" * len(lines[1]))
    lines.append("On held-out text: " + "; ".join(_held_out(run, text) for run in runs) + ".")
    lines.append(f"Peak memory is {runs[0].peak_meaning}.")
    for run in runs[1:]:
        gaps = [abs(a - b) for a, b in zip(runs[0].losses, run.losses, strict=True)]
        widest, last = max(range(len(gaps)), key=gaps.__getitem__), abs(run.end_loss - runs[0].end_loss)
        lines.append(
            f"Losses of {run.backend} and {runs[0].backend} differ by {_gap(gaps[0])} at step 1, "
            f"{_gap(last)} at the end, and at most {_gap(gaps[widest])} (step {widest + 1})."
        )
    return "\n".join(lines)


def plot(logs: dict[str, Path], path: Path) -> str | None:
    """Saves the curves of the logs as PNG. Returns the reason if this is not possible."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        return f"no plot: matplotlib does not import ({error})"
    events = {name: read(log) for name, log in logs.items()}
    losses = {name: _values(found, "step") for name, found in events.items()}
    (first, base), *compared = losses.items()
    figure, axes = pyplot.subplots(
        2 if compared else 1,
        1,
        sharex=True,
        squeeze=False,
        figsize=(7.5, 6.0 if compared else 4.0),
        layout="constrained",
    )
    upper = axes[0, 0]
    for index, (name, curve) in enumerate(losses.items()):
        # A dashed line on top of a broad one, so that equal curves stay visible.
        style = {"linewidth": 4.0, "alpha": 0.4} if index == 0 else {"linewidth": 1.2, "linestyle": "--"}
        [line] = upper.plot(list(curve), list(curve.values()), label=name, **style)
        held_out = _values(events[name], "evaluation")
        marker = {"marker": "o" if index == 0 else "x", "linestyle": "none", "color": line.get_color()}
        upper.plot(list(held_out), list(held_out.values()), label=f"{name}, held-out", **marker)
    token = next((e["token"] for e in events[first] if e["event"] == "start"), "token")
    upper.set_ylabel(f"loss (nats per {token})")
    upper.legend()
    for name, curve in compared:
        gaps = {step: abs(loss - base[step]) or None for step, loss in curve.items() if step in base}
        axes[1, 0].semilogy(list(gaps), list(gaps.values()), linewidth=0.9, label=name)
    if compared:
        axes[1, 0].set_ylabel(f"|difference to {first}|")
        axes[1, 0].legend()
    axes[-1, 0].set_xlabel("step")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.25)
    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        return f"no plot: cannot write {path}: {error.strerror or error}"
    finally:
        pyplot.close(figure)
    return None


def plot_health(run: Run, log: Path, path: Path) -> str | None:
    """Saves the health of a run over its steps as PNG. Returns the reason if this is not possible."""
    events = read(log)
    rates = {e["step"]: e["lr"] for e in events if e["event"] == "step"}
    try:
        curves = {"loss": _values(events, "step"), "learning rate": rates}
        write_history_png(path, run.health, curves, f"{run.backend}, {run.step} steps")
    except ImportError as error:
        return f"no plot: matplotlib does not import ({error})"
    except OSError as error:
        return f"no plot: cannot write {path}: {error.strerror or error}"
    return None


def health(run: Run) -> str:
    """The concerns at the end of a run."""
    lines = run.health.concerns()
    shown = lines[:MOST_CONCERNS] + ([f"and {len(lines) - MOST_CONCERNS} more"] if lines[MOST_CONCERNS:] else [])
    where = f"Health of {run.backend} at step {run.health.steps[-1]}, and since step {run.health.steps[0]}:"
    return "\n  ".join([where, *shown]) if lines else f"{where} nothing to worry about"


def _values(events: list[dict[str, Any]], kind: str) -> dict[int, float]:
    """The finite losses of one kind of event by step."""
    return {e["step"]: e["loss"] for e in events if e["event"] == kind and e.get("loss") is not None}


def sample(
    model: Transformer,
    prompt: Sequence[int],
    count: int,
    temperature: float,
    seed: int,
    vocabulary: Bytes = BYTES,
) -> tuple[str, GenerationStats]:
    """The prompt continued by `count` sampled tokens, and the speed of generation."""
    device = model.tok_embeddings.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    (tokens,), stats = model.generate(
        [list(prompt)], count, temperature=temperature, top_p=0.95, generator=generator, return_stats=True
    )
    decoded = vocabulary.decode(tokens.tolist()).expandtabs(4)
    # A half-trained model may generate control sequences, which must not reach the terminal.
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in decoded), stats


def _choices(config: ModelConfig) -> str:
    """The fields other than sizes in which the model differs from LLaMA."""
    fields = [f for f in dataclasses.fields(ModelConfig) if f.name not in OWN_OPTIONS]
    return ", ".join(f"{f.name}={getattr(config, f.name)}" for f in fields if getattr(config, f.name) != f.default)


def _held_out(run: Run, text: Text) -> str:
    last = run.evaluations[-1]
    bits = f", {last.bits_per_byte:.3f} bits a byte" if text.vocabulary.unit != "byte" else ""
    return f"perplexity {last.perplexity:.3f}{bits} ({run.backend})"


def _speed(run: Run, recipe: Recipe) -> float:
    return recipe.batch * recipe.seq_len / statistics.median(run.seconds)


def _gap(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _count(value: int) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,}"
