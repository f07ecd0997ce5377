"""The training loop of `train.py`: one model, one backend."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import SequentialLR

from examples.training.checkpoint import CheckpointError
from examples.training.log import Log, LogError, read
from examples.training.memory import PeakMemory
from examples.training.optimizer import make_optimizer, make_schedule
from examples.training.parallel import Single
from examples.training.progress import Progress
from examples.training.text import Text
from foundry_kernels.core.registry import is_dtensor
from foundry_kernels.diagnostics import Health, HealthHistory, Recorder, SigmaReparam, record
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.nn import update_selection_biases

HELD_OUT_WINDOWS = 32
END_STEPS = 20  # the final loss is a mean over these; a single batch is noisy


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run except its backend and the machine."""

    model: ModelConfig
    steps: int
    batch: int
    seq_len: int
    lr: float
    seed: int
    dtype: torch.dtype
    device: torch.device
    checkpoint_every: int
    accumulate: int = 1  # number of parts of a batch
    evaluate_every: int = 0  # steps; 0: only at the end
    warm_up: int | None = None  # steps; None: a tenth of all
    diagnose_every: int = 0  # steps, and at the first step; 0: never
    sigma_reparam: bool = False
    compile: bool = False

    def settings(self, backend: str, text: Text) -> dict[str, Any]:
        """The settings, by option, that must equal those of a checkpoint to resume it."""
        return {f"model {name}": value for name, value in dataclasses.asdict(self.model).items()} | {
            "--backend": backend,
            "--batch": self.batch,
            "--dtype": str(self.dtype).removeprefix("torch."),
            "--lr": self.lr,
            "--seed": self.seed,
            "--seq-len": self.seq_len,
            "--steps": self.steps,
            "--text": f"{text.name} (sha256 {text.digest[:12]})",
            **({} if self.warm_up is None else {"warm-up": self.warm_up}),
            **({"--sigma-reparam": True} if self.sigma_reparam else {}),
        }


@dataclass(frozen=True)
class Evaluation:
    """An evaluation after `step` steps, always on the same held-out windows."""

    step: int
    loss: float  # nats per token
    bits_per_byte: float

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))


@dataclass
class Run:
    """A finished or interrupted run."""

    backend: str
    model: Transformer | None
    losses: list[float] = field(default_factory=list)  # loss of each step's batch, before the step
    seconds: list[float] = field(default_factory=list)  # of each step
    evaluations: list[Evaluation] = field(default_factory=list)
    health: HealthHistory = field(default_factory=HealthHistory)
    peak_bytes: int = 0
    peak_meaning: str = ""

    @property
    def step(self) -> int:
        return len(self.losses)

    @property
    def held_out(self) -> float:
        """The last loss on held-out text."""
        return self.evaluations[-1].loss if self.evaluations else math.nan

    @property
    def end_loss(self) -> float:
        """The mean of the last steps' losses."""
        return statistics.fmean(self.losses[-END_STEPS:])


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
    log: Path | None = None,
    board: Path | None = None,
) -> Run:
    """Trains from the seed, or resumes from `checkpoint`.

    Args:
        checkpoint: written every `recipe.checkpoint_every` steps, at the end and when `stop` ends the run; or None.
        resume: continue from `checkpoint`, which must exist.
        stop: called after every step with the number of steps; True ends the run.
        progress: whether to show the progress on stderr.
        processes: the processes that train together; None for a single one.
        log: JSON, a line for each event (see `log.py`), continued with `resume`; or None.
        board: a folder for TensorBoard, also continued with `resume`; or None.

    Raises:
        CheckpointError: the checkpoint cannot be read, continued from or written.
        LogError: the log cannot be read or written.
    """
    settings = recipe.settings(backend, text)
    processes = processes or Single()
    state = processes.load(checkpoint, settings) if resume and checkpoint is not None else None
    memory = PeakMemory(recipe.device)
    torch.manual_seed(recipe.seed)
    with recipe.device:
        whole = Transformer(recipe.model, backend)
        reparam = SigmaReparam(whole) if recipe.sigma_reparam else None
        model = processes.divide(whole)
    if recipe.compile:
        model.compile()
    optimizer = make_optimizer(model, recipe.lr)
    if recipe.model.selection_bias:
        optimizer.register_step_post_hook(lambda *_: update_selection_biases(model))
    schedule = make_schedule(optimizer, recipe.steps, recipe.warm_up)
    order = torch.Generator().manual_seed(recipe.seed)  # on the CPU, so that every device gets the same batches
    run = Run(backend, None)
    if state is not None and checkpoint is not None:
        _restore(run, processes, model, optimizer, schedule, order, state, checkpoint)
    model.train()

    def write() -> None:
        if checkpoint is not None:
            run.peak_bytes = max(run.peak_bytes, memory.bytes())
            processes.save(checkpoint, settings, model, optimizer, _progress(run, schedule, order, text))

    with (
        Progress(backend, recipe.steps, run.step, progress) as shown,
        Log(*((log, run.step, board) if processes.first else (None, run.step))) as events,
    ):
        if log is not None and processes.first:
            for event in health_in(log):
                run.health.append(*event)
        if run.step == 0:
            events.write("start", step=0, backend=backend, token=text.vocabulary.unit, settings=settings)
        while run.step < recipe.steps:
            start = time.perf_counter()
            batch = text.batch(recipe.batch, recipe.seq_len, order)
            lr = optimizer.param_groups[0]["lr"]
            part, norm, health = _step(processes, model, optimizer, recipe, batch, run.step)
            schedule.step()
            loss, stopped = processes.agree(part, stop(run.step + 1))
            run.losses.append(loss)  # reading it synchronised with the device
            run.seconds.append(time.perf_counter() - start)
            shown.step(loss)
            events.write(
                "step", step=run.step, loss=loss, lr=lr, grad_norm=norm.item(),
                tokens_per_second=recipe.batch * recipe.seq_len / run.seconds[-1], peak_bytes=memory.bytes(),
            )  # fmt: skip
            if health is not None:
                run.health.append(run.step, health)
                events.write("health", **{"step": run.step, **health.as_dict(), "concerns": run.health.concerns()})
            last = run.step == recipe.steps
            if last or (recipe.evaluate_every and run.step % recipe.evaluate_every == 0):
                found = evaluate(model, recipe, text, run.step, processes)
                run.evaluations.append(found)
                events.write("evaluation", **dataclasses.asdict(found), perplexity=found.perplexity)
            if stopped or last or run.step % recipe.checkpoint_every == 0:
                write()
            if stopped:
                break
        run.peak_bytes = max(run.peak_bytes, memory.bytes())
        run.peak_meaning = memory.meaning
        if run.step == recipe.steps:
            events.write("summary", **summary(run, recipe))
    run.model = processes.whole(model)
    if reparam is not None and run.model is whole:
        reparam.remove()
    return run


def _step(
    processes: Single,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    batch: tuple[Tensor, Tensor],
    step: int,
) -> tuple[Tensor, Tensor, Health | None]:
    """Trains on this process's part of the batch. Returns the mean loss, the norm of the gradients before clipping and,
    on diagnosed steps, the model's health before the step (attention and activations are those of the last part)."""
    _seed_dropout(recipe, step, processes.rank)
    parts = [processes.share(part).to(recipe.device) for whole in batch for part in whole.chunk(recipe.accumulate)]
    losses = []
    pairs = zip(parts[: recipe.accumulate], parts[recipe.accumulate :], strict=True)
    with _recording(model, recipe, step) as recorder:
        for index, (tokens, targets) in enumerate(pairs):
            with processes.accumulating(model, index == recipe.accumulate - 1):
                with autocast(recipe):
                    _, loss = model(tokens, targets)
                (loss / recipe.accumulate).backward()
            losses.append(loss.detach())
    health = None if recorder is None else recorder.health()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=processes.foreach)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    norm = norm.full_tensor() if is_dtensor(norm) else norm  # type: ignore[attr-defined]
    return torch.stack(losses).mean(), norm, health


def _recording(model: nn.Module, recipe: Recipe, step: int) -> AbstractContextManager[Recorder | None]:
    if not recipe.diagnose_every or (step and (step + 1) % recipe.diagnose_every):
        return nullcontext()
    return record(model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model)


def health_in(log: Path) -> Iterator[tuple[int, Health]]:
    """The health entries of a log."""
    for event in read(log):
        if event["event"] == "health":
            try:
                yield event["step"], Health.from_dict(event)
            except (KeyError, TypeError) as error:
                raise LogError(f"{log} is damaged: the health at step {event['step']}: {error!r}") from None


def _seed_dropout(recipe: Recipe, step: int, rank: int) -> None:
    """Sets the step's own seed, so that a resumed run has the dropout of an uninterrupted one."""
    if recipe.model.embedding_dropout or recipe.model.residual_dropout or recipe.model.attention_dropout:
        torch.manual_seed((recipe.seed * 1_000_003 + step * 1_009 + rank) % 2**63)


@torch.no_grad()
def evaluate(model: nn.Module, recipe: Recipe, text: Text, step: int, processes: Single | None = None) -> Evaluation:
    """Returns the mean loss on windows of the held-out tail, without storing logits."""
    model.eval()
    tokens, targets = text.held_out_batch(HELD_OUT_WINDOWS, recipe.seq_len)
    losses = []
    window = (processes or Single()).window
    for part in range(0, HELD_OUT_WINDOWS, 8):
        windows = [window(x[part : part + 8]).to(recipe.device) for x in (tokens, targets)]
        with autocast(recipe):
            _, loss = model(*windows)
        losses.append(loss.item())
    model.train()
    mean = statistics.fmean(losses)
    bits = mean / math.log(2.0) * targets.numel() / text.vocabulary.count_bytes(targets)
    return Evaluation(step, mean, bits)


def summary(run: Run, recipe: Recipe) -> dict[str, Any]:
    """The results of a finished run."""
    last = run.evaluations[-1]
    return {
        "step": run.step,
        "loss": run.end_loss,
        "held_out_loss": last.loss,
        "perplexity": last.perplexity,
        "bits_per_byte": last.bits_per_byte,
        "tokens_per_second": recipe.batch * recipe.seq_len / statistics.median(run.seconds),
        "peak_bytes": run.peak_bytes,
        "seconds": sum(run.seconds),
    }


def _progress(run: Run, schedule: SequentialLR, order: torch.Generator, text: Text) -> dict[str, Any]:
    """The state in a checkpoint besides the model and the optimizer."""
    return {
        "schedule": schedule.state_dict(),
        "order": order.get_state(),
        "losses": run.losses,
        "seconds": run.seconds,
        "evaluations": [dataclasses.astuple(each) for each in run.evaluations],
        "peak_bytes": run.peak_bytes,
        "tokenizer": text.vocabulary.state(),
    }


def _restore(
    run: Run,
    processes: Single,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: SequentialLR,
    order: torch.Generator,
    state: dict[str, Any],
    path: Path,
) -> None:
    try:
        processes.restore(path, state, model, optimizer)
        schedule.load_state_dict(state["schedule"])
        order.set_state(state["order"])
        run.losses, run.seconds = list(map(float, state["losses"])), list(map(float, state["seconds"]))
        run.evaluations = [Evaluation(*each) for each in state["evaluations"]]
        run.peak_bytes = int(state["peak_bytes"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        reason = str(error).splitlines()[0][:120] if str(error) else ""
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {reason}") from None
    if len(run.losses) != len(run.seconds):
        raise CheckpointError(f"{path} is damaged: {len(run.losses)} losses, {len(run.seconds)} times")
