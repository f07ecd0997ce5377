"""Train the variants, each from the same seeds on the same batches, and keep what came of it: a JSON file and the
weights of each run. A run that is already there is not repeated."""

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

from examples.ablation.settings import DTYPES, Settings, UsageError, load, save
from examples.ablation.variants import config_of
from examples.training.text import Text, read_text
from foundry_kernels.models import ModelConfig, Transformer

try:
    from examples.training import loop as train_loop
except ModuleNotFoundError as error:
    if error.name != "tqdm":
        raise
    sys.exit("error: tqdm is missing; pip install 'foundry-kernels[train]'")

#: Predicted bytes of the held-out text, at most.
HELD_OUT = 98304
MEANS = 16  # of the losses of a run, over as many parts of it


def run_path(folder: Path, name: str, seed: int) -> Path:
    return folder / f"run-{name}-seed{seed}.json"


def weights_path(folder: Path, name: str, seed: int) -> Path:
    return folder / f"run-{name}-seed{seed}.pt"


def train_all(folder: Path, path: Path, settings: Settings, names: Sequence[str], seeds: Sequence[int]) -> None:
    """All runs that are not in the folder yet."""
    text = read_text(path, settings.seq_len)
    for seed in seeds:
        for name in names:
            if (found := load_run(folder, name, seed, text)) is not None:
                print(f"{name}, seed {seed}: held-out loss {found['held_out']:.4f}, kept", flush=True)
                continue
            print(f"{name}, seed {seed}:", file=sys.stderr)
            model, run = train(config_of(name, settings.shape), settings, text, seed, name)
            weights = {"config": dataclasses.asdict(model.config), "model": model.state_dict()}
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(weights, weights_path(folder, name, seed))
            save(run_path(folder, name, seed), run)  # last: what has it is whole
            print(f"{name}, seed {seed}: held-out loss {run['held_out']:.4f}, {run['seconds']:.0f} s", flush=True)


def load_run(folder: Path, name: str, seed: int, text: Text | None = None) -> dict[str, Any] | None:
    """What a run left, or None where there is none.

    Raises:
        UsageError: it is of another text.
    """
    run: dict[str, Any] | None = load(run_path(folder, name, seed))
    if run is not None and text is not None and run["text"]["sha256"] != text.digest:
        raise UsageError(
            f"{run_path(folder, name, seed)} is of another text, {run['text']['name']}; choose another --out"
        )
    return run


def load_model(folder: Path, name: str, seed: int, config: ModelConfig) -> Transformer:
    """The trained weights in a model of `config`, which may differ from the run's in what has no weights.

    Raises:
        UsageError: they are not there.
    """
    path = weights_path(folder, name, seed)
    if not path.exists():
        raise UsageError(f"{path} is missing; remove {run_path(folder, name, seed).name} to have both made again")
    content = torch.load(path, weights_only=True)
    model = Transformer(config)
    model.load_state_dict(content["model"])
    return model.eval()


def train(
    config: ModelConfig, settings: Settings, text: Text, seed: int, name: str = ""
) -> tuple[Transformer, dict[str, Any]]:
    """One run: the model, and what is kept of it."""
    recipe = train_loop.Recipe(
        config,
        settings.steps,
        settings.batch,
        settings.seq_len,
        settings.lr,
        seed,
        DTYPES[settings.dtype],
        torch.device("cpu"),
        checkpoint_every=settings.steps,
    )
    done = train_loop.train(recipe, "auto", text, None)
    model, losses = done.model, done.losses
    assert model is not None
    if not math.isfinite(losses[-1]):
        raise UsageError(f"{name} diverged: its loss is {losses[-1]}; choose a smaller --lr")
    every = max(1, settings.steps // MEANS)
    stops = range(every, settings.steps + 1, every)
    return model, {
        "name": name,
        "seed": seed,
        "parameters": config.n_parameters,
        "ffn_width": config.ffn_width,
        "held_out": losses_by_position(model, text.held_out, settings.seq_len).mean().item(),
        "curve": [(stop, round(statistics.fmean(losses[stop - every : stop]), 4)) for stop in stops],
        "threads": torch.get_num_threads(),
        "seconds": round(sum(done.seconds), 1),
        "text": {"name": Path(text.name).name, "sha256": text.digest, "train": len(text.train)},
    }


@torch.no_grad()
def losses_by_position(model: Transformer, data: Tensor, length: int, tokens: int = HELD_OUT) -> Tensor:
    """Mean loss at each position of windows of `length` that do not overlap, float64 ``[length]``: in float32, of the
    first `tokens` predictions or as many whole windows as there are."""
    count = max(1, min(tokens, len(data) - 1) // length)
    windows = data[: count * length].view(count, length).long()
    targets = data[1 : count * length + 1].view(count, length).long()
    total = torch.zeros(length, dtype=torch.float64)
    model.eval()
    rows = max(1, 4096 // length)  # windows at a time
    for part, wanted in zip(windows.split(rows), targets.split(rows), strict=True):
        logits = model(part)
        total += F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none").double().sum(0)
    model.train()
    return total / count
