"""Train a small transformer on a text, once per backend from the same seed, and compare.

    python examples/train.py                            # on the standard library's source: reference, then auto
    python examples/train.py --text shakespeare.txt --steps 1000 --backend native
    python examples/train.py --out runs/a --resume      # continue where runs/a was interrupted
    python examples/train.py --family gpt2 --set positions=alibi --tokens shakespeare.bin
    torchrun --nproc-per-node 2 examples/train.py --parallel fsdp

Each backend starts from the same weights and sees the same batches, so losses differ only by rounding.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

if not __package__:  # run as a file; installed packages take precedence over the checkout
    sys.path.append(str(Path(__file__).resolve().parents[1]))

try:
    from examples.training.checkpoint import CheckpointError
    from examples.training.log import LogError, read, tensorboard
    from examples.training.loop import Recipe, Run, autocast, train
    from examples.training.options import UsageError, make_recipe, parse
    from examples.training.parallel import Parallel, ParallelError, Single
    from examples.training.report import header, health, kernels, plot, plot_health, sample, table
    from examples.training.schedule import learning_rates, plot_schedule
    from examples.training.text import Text, TextError, read_text
    from examples.training.tokens import open_tokens
except ModuleNotFoundError as error:
    if error.name != "tqdm":
        raise
    sys.exit("error: tqdm is missing; pip install 'foundry-kernels[train]'")

from foundry_kernels import BackendUnavailable
from foundry_kernels.models import ModelConfig, Transformer

PROMPT_TOKENS = 32


class Interrupt:
    """Ctrl-C ends a run after the current step, so that the checkpoint is complete; a second one ends it at once."""

    def __init__(self) -> None:
        self.raised = False

    def __call__(self, step: int) -> bool:
        return self.raised

    @contextlib.contextmanager
    def listening(self) -> Iterator[Interrupt]:
        def handle(number: int, frame: FrameType | None) -> None:
            self.raised = True
            signal.signal(signal.SIGINT, previous)

        previous = signal.signal(signal.SIGINT, handle)
        try:
            yield self
        finally:
            signal.signal(signal.SIGINT, previous)


def choose_backends(asked: list[str] | None, recipe: Recipe) -> tuple[dict[str, str], int]:
    """The backends to run, each with its kernels, and the number of parameters.

    Without --backend: the reference, and "auto" if it does not run on the reference.
    """
    rows, parameters = {}, 0
    with torch.device("meta"):
        for name in dict.fromkeys(asked or ["reference", "auto"]):
            model = Transformer(recipe.model, name)
            served = model.serving(recipe.device.type, recipe.dtype)
            parameters = sum(p.numel() for p in model.parameters())
            if not asked and name == "auto" and set(served.values()) == {"reference"}:
                print("Only the reference can run here, so there is nothing to compare it with.", file=sys.stderr)
                print("`python -m foundry_kernels` shows the reasons.\n", file=sys.stderr)
                continue
            rows[name] = kernels(served)
    return rows, parameters


def prepare_folder(options: argparse.Namespace, backends: list[str], suffix: str) -> tuple[Path, dict[str, Path]]:
    """The output folder, which is not created yet, and each backend's checkpoint in it."""
    if options.resume and options.out is None:
        raise UsageError("--resume needs --out, the folder of the run to continue")
    folder = options.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    checkpoints = {name: folder / f"checkpoint-{name}{suffix}" for name in backends}
    present = [path for path in checkpoints.values() if path.exists()]
    if options.resume and not present:
        raise UsageError(f"nothing to resume: no {' or '.join(path.name for path in checkpoints.values())} in {folder}")
    if present and not options.resume:
        raise UsageError(f"{present[0]} exists; continue it with --resume or name another folder with --out")
    return folder, checkpoints


def run_all(options: argparse.Namespace) -> int:
    if options.plot_schedule is not None:
        return draw_schedule(options)
    if options.text is not None and options.tokens is not None:
        raise UsageError("--tokens and --text cannot be combined")
    text = open_tokens(options.tokens, options.seq_len) if options.tokens else read_text(options.text, options.seq_len)
    prompt = opening(text) if options.prompt is None else text.vocabulary.encode(options.prompt)
    if not prompt:
        raise UsageError("--prompt must not be empty")
    recipe = make_recipe(options, len(prompt), text.vocabulary.size)
    with processes_of(options, recipe) as processes:
        return run_on(processes, options, recipe, text, prompt)


def draw_schedule(options: argparse.Namespace) -> int:
    recipe = make_recipe(options, 1)
    if problem := plot_schedule(learning_rates(recipe.lr, recipe.steps), options.plot_schedule):
        raise UsageError(f"--plot-schedule: {problem}")
    print(f"Learning rate: {options.plot_schedule}")
    return 0


@contextlib.contextmanager
def processes_of(options: argparse.Namespace, recipe: Recipe) -> Iterator[Single]:
    """This process and its peers; only the first one prints."""
    if not options.parallel:
        yield Single()
        return
    processes = Parallel(options.parallel, recipe.device.type)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if processes.first else nowhere):
            yield processes
    finally:
        processes.end()


def run_on(processes: Single, options: argparse.Namespace, recipe: Recipe, text: Text, prompt: list[int]) -> int:
    processes.check(recipe.model, recipe.batch // recipe.accumulate, recipe.seq_len)
    rows, parameters = choose_backends(options.backend, recipe)
    folder, checkpoints = processes.same(lambda: prepare_folder(options, list(rows), processes.suffix))
    resumed = {name for name, path in checkpoints.items() if options.resume and path.exists()}
    logs = {name: folder / f"log-{name}.jsonl" for name in rows}
    for name in resumed:  # check all before hours of training
        processes.load(checkpoints[name], recipe.settings(name, text))
        if logs[name].exists():
            read(logs[name])
    if options.tensorboard:
        tensorboard()
    boards = {name: folder / "tensorboard" / name if options.tensorboard else None for name in rows}
    picture = options.plot or folder / "loss.png"
    for place in (folder, picture.parent):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot create the folder {place}: {error.strerror or error}") from None

    print(header(recipe, text, rows, parameters), flush=True)
    print()
    warm_up(recipe)
    runs: list[Run] = []
    with Interrupt().listening() as interrupt:
        for name in rows:
            run = train(
                recipe, name, text, checkpoints[name], resume=name in resumed, stop=interrupt,
                progress=processes.first, processes=processes, log=logs[name], board=boards[name],
            )  # fmt: skip
            if run.step < recipe.steps:
                again = f"--resume --out {folder}, and the other options as they were"
                if processes.first:
                    print(f"\nInterrupted at step {run.step} of {name}; to continue: {again}", file=sys.stderr)
                return 130
            runs.append(run)
            if len(runs) < len(rows):
                run.model = None  # so that it does not count in the next run's peak memory
    if not processes.first:
        return 0
    print()
    print(table(runs, recipe, text))
    model = runs[-1].model
    assert model is not None
    if options.sample_tokens:
        show_sample(model, prompt, recipe, options, text)
    for run in runs:
        if not len(run.health):  # a run without diagnostics
            continue
        path = folder / f"health-{run.backend}.png"
        print(f"\n{health(run)}\n{plot_health(run, logs[run.backend], path) or f'Over the steps: {path}'}")
    problem = plot(logs, picture)
    print(f"\n{problem or f'Loss curves: {picture}'}\nCheckpoints and logs: {folder}")
    return 0


def opening(text: Text) -> list[int]:
    """A few held-out tokens, from the beginning of a line."""
    head = text.held_out[:2000].tolist()
    start = next((i + 1 for i, token in enumerate(head) if "\n" in text.vocabulary.decode([token])), 0)
    return head[start : start + PROMPT_TOKENS] or head[:PROMPT_TOKENS]


def warm_up(recipe: Recipe) -> None:
    """Runs one small step, so that no backend's time includes the loading of libraries."""
    small = ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=8, max_seq_len=8)
    with recipe.device:
        model = Transformer(small, "reference")
        tokens = torch.zeros(2, 8, dtype=torch.int64)
    with autocast(recipe):
        _, loss = model(tokens, tokens)
    loss.backward()


def show_sample(model: Transformer, prompt: list[int], recipe: Recipe, options: argparse.Namespace, text: Text) -> None:
    unit, limit = text.vocabulary.unit, model.config.max_seq_len
    count = min(options.sample_tokens, limit - len(prompt))
    if count < 1:
        print(f"\nNo sample: learned positions end at {limit}; the prompt has {len(prompt)} {unit}s.")
        return
    with autocast(recipe):
        written, stats = sample(model, prompt, count, options.temperature, options.seed, text.vocabulary)
    print(f"\nSample of {count} {unit}s, temperature {options.temperature}; {stats}:\n")
    print("\n".join(f"  | {shorten(line)}" for line in written.split("\n")))


def shorten(line: str) -> str:
    return line if len(line) <= 100 else line[:99] + "…"


def main(argv: list[str] | None = None) -> int:
    try:
        return run_all(parse(argv, __doc__))
    except (UsageError, ParallelError, TextError, CheckpointError, LogError, BackendUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
