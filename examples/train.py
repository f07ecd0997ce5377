"""Train a small byte-level transformer on a text, once per backend from the same seed, and compare.

    python examples/train.py                            # on the standard library's source: reference, then auto
    python examples/train.py --text shakespeare.txt --steps 1000 --backend native
    python examples/train.py --out runs/a --resume      # continue where runs/a was interrupted
    torchrun --nproc-per-node 2 examples/train.py --parallel fsdp

Each backend starts from the same weights and sees the same batches, so that losses differ by rounding only.
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

try:
    from train_checkpoint import CheckpointError
    from train_loop import Recipe, Run, autocast, train
    from train_parallel import KINDS, Parallel, ParallelError, Single
    from train_report import header, kernels, plot, sample, table
    from train_text import Text, TextError, read_text
except ModuleNotFoundError as error:
    if error.name != "tqdm":
        raise
    sys.exit("error: tqdm is missing; pip install 'foundry-kernels[train]'")

from foundry_kernels import BackendUnavailable
from foundry_kernels.models import ModelConfig, Transformer
from foundry_kernels.registry import BACKENDS

VOCABULARY = 256  # a token is a byte
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class UsageError(Exception):
    """Options that cannot be run; the message is for the user."""


class Interrupt:
    """Ctrl-C ends a run after the step it is in, so that the checkpoint is whole; a second one ends it at once."""

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


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="any file, read as bytes (default: the standard library's source)")
    add("--backend", nargs="+", choices=("auto", *BACKENDS), metavar="NAME", help="default: reference auto")
    add("--device", help="cpu, cuda, cuda:1 (default: cuda where there is one)")
    add("--dtype", choices=DTYPES, default="float32", help="bfloat16: autocast, with parameters in float32")
    add("--steps", type=int, default=300)
    add("--batch", type=int, default=8)
    add("--accumulate", type=int, default=1, metavar="PARTS", help="split each batch into this many")
    add("--parallel", choices=KINDS, help="train on the processes that torchrun started; --batch is their total")
    add("--seq-len", type=int, default=128)
    add("--dim", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=8)
    add("--kv-heads", type=int, default=4)
    add("--lr", type=float, default=1e-3, help="peak learning rate of AdamW")
    add("--seed", type=int, default=0)
    add("--out", type=Path, metavar="DIR", help="checkpoints and plot (default: a new folder in runs/)")
    add("--checkpoint-every", type=int, default=100, metavar="STEPS")
    add("--resume", action="store_true", help="continue the runs in --out")
    add("--plot", type=Path, metavar="FILE", help="PNG of the loss curves (default: loss.png in --out)")
    add("--prompt", help="prompt of the sample at the end (default: the first held-out bytes)")
    add("--sample-tokens", type=int, default=240, help="bytes to generate at the end; 0 for none")
    add("--temperature", type=float, default=0.7)
    return parser.parse_args(argv)


def make_recipe(options: argparse.Namespace, prompt: int) -> Recipe:
    """Check the options; `prompt` is the prompt's length in bytes."""
    for name in ("steps", "batch", "accumulate", "seq_len", "checkpoint_every"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1; got {getattr(options, name)}")
    if options.batch % options.accumulate:
        raise UsageError(f"--batch must be a multiple of --accumulate {options.accumulate}; got {options.batch}")
    if options.sample_tokens < 0:
        raise UsageError(f"--sample-tokens must be at least 0; got {options.sample_tokens}")
    for name in ("lr", "temperature"):
        if not 0.0 < getattr(options, name) < float("inf"):
            raise UsageError(f"--{name} must be above 0; got {getattr(options, name)}")
    try:
        device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(0, device=device)
        if device.type not in ("cpu", "cuda"):
            raise UsageError(f"--device must be cpu or cuda; got {options.device}")
    except (RuntimeError, AssertionError) as error:  # torch without CUDA raises AssertionError
        raise UsageError(f"--device {options.device}: {str(error).splitlines()[0]}") from None
    try:
        model = ModelConfig(
            dim=options.dim,
            n_layers=options.layers,
            n_heads=options.heads,
            n_kv_heads=options.kv_heads,
            vocab_size=VOCABULARY,
            max_seq_len=max(options.seq_len, prompt + options.sample_tokens),
        )
    except ValueError as error:
        raise UsageError(f"the model's shape: {error}") from None
    return Recipe(
        model,
        options.steps,
        options.batch,
        options.seq_len,
        options.lr,
        options.seed,
        DTYPES[options.dtype],
        device,
        options.checkpoint_every,
        options.accumulate,
    )


def choose_backends(asked: list[str] | None, recipe: Recipe) -> tuple[dict[str, str], int]:
    """The backends to run, each with what it comes down to, and the number of parameters.

    Without --backend: the reference, and "auto" where that is anything else.
    """
    rows, parameters = {}, 0
    with torch.device("meta"):
        for name in dict.fromkeys(asked or ["reference", "auto"]):
            model = Transformer(recipe.model, name)
            served = model.serving(recipe.device.type, recipe.dtype)
            parameters = sum(p.numel() for p in model.parameters())
            if not asked and name == "auto" and set(served.values()) == {"reference"}:
                print("Only the reference can run here, so there is nothing to compare it with.", file=sys.stderr)
                print("`python -m foundry_kernels` says why.\n", file=sys.stderr)
                continue
            rows[name] = kernels(served)
    return rows, parameters


def prepare_folder(options: argparse.Namespace, backends: list[str], suffix: str) -> tuple[Path, dict[str, Path]]:
    """The folder to write to, not yet made, and each backend's checkpoint in it."""
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
    text = read_text(options.text, options.seq_len)
    prompt = opening(text) if options.prompt is None else options.prompt.encode()
    if not prompt:
        raise UsageError("--prompt must not be empty")
    recipe = make_recipe(options, len(prompt))
    with processes_of(options, recipe) as processes:
        return run_on(processes, options, recipe, text, prompt)


@contextlib.contextmanager
def processes_of(options: argparse.Namespace, recipe: Recipe) -> Iterator[Single]:
    """This process and those that train with it; only the first one prints."""
    if not options.parallel:
        yield Single()
        return
    processes = Parallel(options.parallel, recipe.device.type)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if processes.first else nowhere):
            yield processes
    finally:
        processes.end()


def run_on(processes: Single, options: argparse.Namespace, recipe: Recipe, text: Text, prompt: bytes) -> int:
    processes.check(recipe.model, recipe.batch // recipe.accumulate)
    rows, parameters = choose_backends(options.backend, recipe)
    folder, checkpoints = processes.same(lambda: prepare_folder(options, list(rows), processes.suffix))
    resumed = {name for name, path in checkpoints.items() if options.resume and path.exists()}
    for name in resumed:  # all of them, before the first hour of training
        processes.load(checkpoints[name], recipe.settings(name, text))
    picture = options.plot or folder / "loss.png"
    for place in (folder, picture.parent):
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"cannot make the folder {place}: {error.strerror or error}") from None

    print(header(recipe, text, rows, parameters), flush=True)
    print()
    warm_up(recipe)
    runs: list[Run] = []
    with Interrupt().listening() as interrupt:
        for name in rows:
            run = train(
                recipe, name, text, checkpoints[name],
                resume=name in resumed, stop=interrupt, progress=processes.first, processes=processes,
            )  # fmt: skip
            if run.step < recipe.steps:
                again = f"--resume --out {folder}, and the other options as they were"
                if processes.first:
                    print(f"\nInterrupted at step {run.step} of {name}; to continue: {again}", file=sys.stderr)
                return 130
            runs.append(run)
            if len(runs) < len(rows):
                run.model = None  # the next run's peak memory is to be its own
    if not processes.first:
        return 0
    print()
    print(table(runs, recipe))
    model = runs[-1].model
    assert model is not None
    if options.sample_tokens:
        show_sample(model, prompt, recipe, options)
    problem = plot(runs, picture)
    print(f"\n{problem or f'Loss curves: {picture}'}\nCheckpoints: {folder}")
    return 0


def opening(text: Text) -> bytes:
    """Up to 32 bytes held out, from the first line that begins there."""
    head = bytes(text.held_out[:2000].tolist())
    start = head.find(b"\n") + 1
    return head[start : start + 32] or head[:32]


def warm_up(recipe: Recipe) -> None:
    """Run one small step, so that the libraries that load at first use count against no backend."""
    small = ModelConfig(dim=16, n_layers=1, n_heads=2, vocab_size=VOCABULARY, max_seq_len=8)
    with recipe.device:
        model = Transformer(small, "reference")
        tokens = torch.zeros(2, 8, dtype=torch.int64)
    with autocast(recipe):
        _, loss = model(tokens, tokens)
    loss.backward()


def show_sample(model: Transformer, prompt: bytes, recipe: Recipe, options: argparse.Namespace) -> None:
    start = time.perf_counter()
    with autocast(recipe):
        written = sample(model, prompt, options.sample_tokens, options.temperature, options.seed)
    rate = options.sample_tokens / (time.perf_counter() - start)
    print(f"\nSample of {options.sample_tokens} bytes, temperature {options.temperature}, {rate:,.0f} bytes/s:\n")
    print("\n".join(f"  | {shorten(line)}" for line in written.split("\n")))


def shorten(line: str) -> str:
    return line if len(line) <= 100 else line[:99] + "…"


def main(argv: list[str] | None = None) -> int:
    try:
        return run_all(parse(argv))
    except (UsageError, ParallelError, TextError, CheckpointError, BackendUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
