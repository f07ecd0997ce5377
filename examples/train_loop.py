"""The training loop of `train.py`: one model, one backend."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from train_checkpoint import CheckpointError
from train_memory import PeakMemory
from train_parallel import Single
from train_progress import Progress
from train_text import Text

from foundry_kernels.models import ModelConfig, Transformer

HELD_OUT_WINDOWS = 32


@dataclass(frozen=True)
class Recipe:
    """What determines a run, but for its backend and the machine."""

    model: ModelConfig
    steps: int
    batch: int
    seq_len: int
    lr: float
    seed: int
    dtype: torch.dtype
    device: torch.device
    checkpoint_every: int
    accumulate: int = 1  # parts that a batch is run in

    def settings(self, backend: str, text: Text) -> dict[str, Any]:
        """What a checkpoint must agree with to be continued, by the names of the options."""
        shape = ("dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")
        return {f"model {name}": getattr(self.model, name) for name in shape} | {
            "--backend": backend,
            "--batch": self.batch,
            "--dtype": str(self.dtype).removeprefix("torch."),
            "--lr": self.lr,
            "--seed": self.seed,
            "--seq-len": self.seq_len,
            "--steps": self.steps,
            "--text": f"{text.name} (sha256 {text.digest[:12]})",
        }


@dataclass
class Run:
    """A finished or interrupted run."""

    backend: str
    model: Transformer | None
    losses: list[float] = field(default_factory=list)  # of each step's batch, before the step
    seconds: list[float] = field(default_factory=list)  # of each step
    peak_bytes: int = 0
    peak_meaning: str = ""
    held_out: float = math.nan

    @property
    def step(self) -> int:
        return len(self.losses)


def learning_rate(step: int, recipe: Recipe) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the rate."""
    warm_up = max(1, recipe.steps // 10)
    if step < warm_up:
        return recipe.lr * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, recipe.steps - warm_up)
    return recipe.lr * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * progress)))


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; the loop sets the learning rate."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=True)


def autocast(recipe: Recipe) -> AbstractContextManager[Any]:
    if recipe.dtype == torch.float32:
        return nullcontext()
    return torch.autocast(recipe.device.type, recipe.dtype)


def train(
    recipe: Recipe,
    backend: str,
    text: Text,
    checkpoint: Path | None,
    *,
    resume: bool = False,
    stop: Callable[[int], bool] = lambda step: False,
    progress: bool = True,
    processes: Single | None = None,
) -> Run:
    """Train from the seed, or go on from `checkpoint`.

    Args:
        checkpoint: written every `recipe.checkpoint_every` steps, at the end and where `stop` ends the run; or None.
        resume: continue from `checkpoint`, which must exist.
        stop: asked after every step, with the number of steps done.
        processes: those that train together, of which this is one; None for this one alone.

    Raises:
        CheckpointError: the checkpoint cannot be read, continued from or written.
    """
    settings = recipe.settings(backend, text)
    processes = processes or Single()
    state = processes.load(checkpoint, settings) if resume and checkpoint is not None else None
    memory = PeakMemory(recipe.device)
    torch.manual_seed(recipe.seed)
    with recipe.device:
        model = processes.divide(Transformer(recipe.model, backend))
    optimizer = make_optimizer(model)
    order = torch.Generator().manual_seed(recipe.seed)  # on the CPU everywhere: the same batches on every device
    run = Run(backend, None)
    if state is not None and checkpoint is not None:
        _restore(run, processes, model, optimizer, order, state, checkpoint)
    model.train()

    def write() -> None:
        if checkpoint is not None:
            run.peak_bytes = max(run.peak_bytes, memory.bytes())
            processes.save(checkpoint, settings, model, optimizer, _progress(run, order))

    with Progress(backend, recipe.steps, run.step, progress) as shown:
        while run.step < recipe.steps:
            start = time.perf_counter()
            batch = text.batch(recipe.batch, recipe.seq_len, order)
            part = _step(processes, model, optimizer, recipe, batch, run.step)
            loss, stopped = processes.agree(part, stop(run.step + 1))
            run.losses.append(loss)  # reading it has waited for the device
            run.seconds.append(time.perf_counter() - start)
            shown.step(loss)
            if stopped or run.step % recipe.checkpoint_every == 0 or run.step == recipe.steps:
                write()
            if stopped:
                break
    run.peak_bytes = max(run.peak_bytes, memory.bytes())
    run.peak_meaning = memory.meaning
    if run.step == recipe.steps:
        run.held_out = held_out_loss(model, recipe, text)
    run.model = processes.whole(model)
    return run


def _step(
    processes: Single,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    batch: tuple[Tensor, Tensor],
    step: int,
) -> Tensor:
    """Train on this process's part of the batch; returns its mean loss."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, recipe)
    parts = [processes.share(part).to(recipe.device) for whole in batch for part in whole.chunk(recipe.accumulate)]
    losses = []
    for index, (tokens, targets) in enumerate(zip(parts[: recipe.accumulate], parts[recipe.accumulate :], strict=True)):
        with processes.accumulating(model, index == recipe.accumulate - 1):
            with autocast(recipe):
                _, loss = model(tokens, targets)
            (loss / recipe.accumulate).backward()
        losses.append(loss.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return torch.stack(losses).mean()


@torch.no_grad()
def held_out_loss(model: nn.Module, recipe: Recipe, text: Text) -> float:
    """Mean loss over windows of the held-out tail."""
    model.eval()
    tokens, targets = text.held_out_batch(HELD_OUT_WINDOWS, recipe.seq_len)
    losses = []
    for part in range(0, HELD_OUT_WINDOWS, 8):
        with autocast(recipe):
            _, loss = model(tokens[part : part + 8].to(recipe.device), targets[part : part + 8].to(recipe.device))
        losses.append(loss.item())
    model.train()
    return sum(losses) / len(losses)


def _progress(run: Run, order: torch.Generator) -> dict[str, Any]:
    """What a checkpoint holds besides the model and the optimizer."""
    return {
        "order": order.get_state(),
        "losses": run.losses,
        "seconds": run.seconds,
        "peak_bytes": run.peak_bytes,
    }


def _restore(
    run: Run,
    processes: Single,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    order: torch.Generator,
    state: dict[str, Any],
    path: Path,
) -> None:
    try:
        processes.restore(path, state, model, optimizer)
        order.set_state(state["order"])
        run.losses, run.seconds = list(map(float, state["losses"])), list(map(float, state["seconds"]))
        run.peak_bytes = int(state["peak_bytes"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else ""
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {reason}") from None
    if len(run.losses) != len(run.seconds):
        raise CheckpointError(f"{path} is damaged: {len(run.losses)} losses, {len(run.seconds)} times")
