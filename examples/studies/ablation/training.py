"""Trains the variants from the same seeds on the same batches, and saves a JSON file and the weights of each run.
Existing runs are not repeated."""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.studies.ablation.machine import machine
from examples.studies.ablation.settings import DTYPES, Settings, UsageError, load, save
from examples.studies.ablation.variants import config_of
from examples.training.text import Text, read_text
from foundry_kernels.models import ModelConfig, Transformer

try:
    from examples.training import loop as train_loop
except ModuleNotFoundError as error:
    if error.name != "tqdm":
        raise
    sys.exit("error: tqdm is missing; pip install 'foundry-kernels[train]'")

MEANS = 16  # mean losses stored for each run, over as many equal parts


def run_path(folder: Path, name: str, seed: int) -> Path:
    return folder / f"run-{name}-seed{seed}.json"


def weights_path(folder: Path, name: str, seed: int) -> Path:
    return folder / f"run-{name}-seed{seed}.pt"


def train_all(
    folder: Path,
    path: Path | None,
    settings: Settings,
    names: Sequence[str],
    seeds: Sequence[int],
    *,
    may_diverge: bool = False,
) -> None:
    """Trains all runs that are missing in the folder, on the file at `path` or on the standard library's source.

    Raises:
        UsageError: a run diverged without `may_diverge`; or there are runs on another text.
    """
    text = read_text(path, settings.seq_len)
    if settings.train_bytes:
        text = dataclasses.replace(text, train=text.train[: settings.train_bytes])
    for seed in seeds:
        for name in names:
            if (found := load_run(folder, name, seed, text)) is not None:
                print(f"{name}, seed {seed}: {_outcome(found)}, kept", flush=True)
                continue
            print(f"{name}, seed {seed}:", file=sys.stderr)
            model, run = train(config_of(name, settings.shape), settings.of(name), text, seed, name)
            if run["held_out"] is None and not may_diverge:
                raise UsageError(f"{name} diverged: its loss is not finite; choose a smaller --lr")
            weights = {"config": dataclasses.asdict(model.config), "model": model.state_dict()}
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, weights_path(folder, name, seed))
            save(run_path(folder, name, seed), run)  # last, so that this file marks a complete run
            print(f"{name}, seed {seed}: {_outcome(run)}, {run['seconds']:.0f} s", flush=True)


def _outcome(run: dict[str, Any]) -> str:
    return "diverged" if run["held_out"] is None else f"held-out loss {run['held_out']:.4f}"


def load_run(folder: Path, name: str, seed: int, text: Text | None = None) -> dict[str, Any] | None:
    """The saved results of a run, or None if there are none.

    Raises:
        UsageError: the run is on another text.
    """
    run: dict[str, Any] | None = load(run_path(folder, name, seed))
    if run is not None and text is not None and run["text"]["sha256"] != text.digest:
        raise UsageError(
            f"{run_path(folder, name, seed)} is of another text, {run['text']['name']}; choose another --out"
        )
    return run


def load_model(folder: Path, name: str, seed: int, config: ModelConfig) -> Transformer:
    """The trained weights in a model of `config`, which may differ from the run's in fields without weights.

    Raises:
        UsageError: the weights are missing.
    """
    path = weights_path(folder, name, seed)
    if not path.exists():
        raise UsageError(f"{path} is missing; remove {run_path(folder, name, seed).name} to train the run again")
    content = torch.load(path, weights_only=True)
    model = Transformer(config)
    model.load_state_dict(content["model"])
    return model.eval()


def train(
    config: ModelConfig, settings: Settings, text: Text, seed: int, name: str = ""
) -> tuple[Transformer, dict[str, Any]]:
    """One run: the model and the results to save. Losses that are not finite are None."""
    every = max(1, settings.steps // MEANS)
    recipe = train_loop.Recipe(
        config,
        settings.steps,
        settings.batch,
        settings.seq_len,
        settings.lr,
        seed,
        DTYPES[settings.dtype],
        torch.device(settings.device),
        checkpoint_every=settings.steps,
        evaluate_every=every,
        warm_up=settings.warm_up_steps,
    )
    done = train_loop.train(recipe, "auto", text, None)
    model, losses = done.model, done.losses
    assert model is not None
    stops = range(every, settings.steps + 1, every)
    return model, {
        "name": name,
        "seed": seed,
        "parameters": config.n_parameters,
        "ffn_width": config.ffn_width,
        "held_out": mean_loss(model, text.held_out, settings),
        "trained_on": mean_loss(model, text.train, settings),
        "curve": [(stop, _finite(statistics.fmean(losses[stop - every : stop]))) for stop in stops],
        "held_out_curve": [(each.step, _finite(each.loss)) for each in done.evaluations],
        "threads": torch.get_num_threads(),
        "machine": machine(settings.device),
        "seconds": round(sum(done.seconds), 1),
        "text": {"name": Path(text.name).name, "sha256": text.digest, "train": len(text.train)},
    }


def mean_loss(model: Transformer, data: Tensor, settings: Settings) -> float | None:
    """The mean loss of the first bytes in windows that do not overlap; None if it is not finite."""
    loss = losses_by_position(model, data, settings.seq_len, settings.held_out).mean().item()
    return loss if math.isfinite(loss) else None


def _finite(loss: float) -> float | None:
    return round(loss, 4) if math.isfinite(loss) else None


@torch.no_grad()
def losses_by_position(model: Transformer, data: Tensor, length: int, tokens: int) -> Tensor:
    """Mean loss at each position of windows of `length` that do not overlap, float64 ``[length]``. The model runs in
    float32, over the first `tokens` predictions or as many whole windows as fit."""
    device = next((p.device for p in model.parameters()), data.device)
    data = data[: tokens + 1].to(device)
    count = max(1, min(tokens, len(data) - 1) // length)
    windows = data[: count * length].view(count, length).long()
    targets = data[1 : count * length + 1].view(count, length).long()
    total = torch.zeros(length, dtype=torch.float64, device=device)
    model.eval()
    rows = max(1, 4096 // length)  # windows at a time
    for part, wanted in zip(windows.split(rows), targets.split(rows), strict=True):
        logits = model(part)
        total += F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").double().sum(0)
    model.train()
    return (total / count).cpu()
