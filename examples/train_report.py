"""What `train.py` shows: the header, the table, the plot, the sample."""

from __future__ import annotations

import statistics
from pathlib import Path

import torch
from train_loop import Recipe, Run
from train_text import Text

from foundry_kernels.models import Transformer

END_STEPS = 20  # the loss at the end is a mean: that of a single batch says little


def kernels(served: dict[str, str]) -> str:
    """`native: rms_norm, add_rms_norm · reference: rope` from a map of operations to backends."""
    names = sorted(set(served.values()), key=lambda name: name == "reference")
    return " · ".join(f"{name}: {', '.join(op for op, b in served.items() if b == name)}" for name in names)


def header(recipe: Recipe, text: Text, rows: dict[str, str], parameters: int) -> str:
    """`rows` maps a backend, as it was asked for, to the kernels behind it."""
    dtype = str(recipe.dtype).removeprefix("torch.")
    device = str(recipe.device)
    device += f" ({torch.get_num_threads()} threads)" if device == "cpu" else f" ({torch.cuda.get_device_name()})"
    shape = recipe.model
    lines = {
        "model": f"{parameters / 1e6:.2f} M parameters: {shape.n_layers} layers of width {shape.dim}, "
        f"{shape.n_heads} heads, {shape.kv_heads} key-value heads, bytes as tokens",
        "text": f"{text.name}: {_count(len(text.train))} bytes to train on, {_count(len(text.held_out))} held out",
        "training": f"{recipe.steps} steps of {recipe.batch} x {recipe.seq_len} bytes, AdamW at {recipe.lr:g}, "
        f"seed {recipe.seed}",
        "device": f"{device}, {dtype}, torch {torch.__version__}",
    } | rows
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def table(runs: list[Run], recipe: Recipe) -> str:
    """One row a run; the speed of the others is compared with the first row's."""
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
                f"{_end(run):.4f}",
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
    lines.append(f"Peak memory is {runs[0].peak_meaning}.")
    for run in runs[1:]:
        gaps = [abs(a - b) for a, b in zip(runs[0].losses, run.losses, strict=True)]
        widest = max(range(len(gaps)), key=gaps.__getitem__)
        lines.append(
            f"Losses of {run.backend} and {runs[0].backend} differ by {_gap(gaps[0])} at step 1, "
            f"{_gap(abs(_end(run) - _end(runs[0])))} at the end, and at most {_gap(gaps[widest])} (step {widest + 1})."
        )
    return "\n".join(lines)


def plot(runs: list[Run], path: Path) -> str | None:
    """Save the loss curves as PNG; returns the reason where that is not possible."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        return f"no plot: matplotlib does not import ({error})"
    compared = runs[1:]
    figure, axes = pyplot.subplots(
        2 if compared else 1,
        1,
        sharex=True,
        squeeze=False,
        figsize=(7.5, 6.0 if compared else 4.0),
        layout="constrained",
    )
    upper = axes[0, 0]
    for index, run in enumerate(runs):  # a dashed line on top of a broad one: equal curves both stay visible
        style = {"linewidth": 4.0, "alpha": 0.4} if index == 0 else {"linewidth": 1.2, "linestyle": "--"}
        upper.plot(range(1, run.step + 1), run.losses, label=run.backend, **style)
    upper.set_ylabel("loss (nats per byte)")
    upper.legend()
    for run in compared:
        gaps = [abs(a - b) for a, b in zip(runs[0].losses, run.losses, strict=True)]
        axes[1, 0].semilogy(range(1, run.step + 1), [gap or None for gap in gaps], linewidth=0.9, label=run.backend)
    if compared:
        axes[1, 0].set_ylabel(f"|difference to {runs[0].backend}|")
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


def sample(model: Transformer, prompt: bytes, count: int, temperature: float, seed: int) -> str:
    """The prompt continued by `count` bytes, drawn with the key-value cache."""
    device = model.tok_embeddings.weight.device
    generator = torch.Generator(device).manual_seed(seed)
    tokens = model.generate([list(prompt)], count, temperature=temperature, top_p=0.95, generator=generator)[0]
    decoded = bytes(tokens.tolist()).decode("utf-8", errors="replace")
    # Bytes of a half-trained model may hold anything, which must not reach the terminal as a control sequence.
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in decoded.expandtabs(4))


def _end(run: Run) -> float:
    return statistics.fmean(run.losses[-END_STEPS:])


def _speed(run: Run, recipe: Recipe) -> float:
    return recipe.batch * recipe.seq_len / statistics.median(run.seconds)


def _gap(value: float) -> str:
    return f"{value:.0e}" if value else "0"


def _count(value: int) -> str:
    return f"{value / 1e6:.2f} M" if value >= 1e6 else f"{value:,}"
