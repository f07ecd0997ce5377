"""Perplexity beyond the trained length, for each kind of positions: learned, sinusoidal, rotary with each scaling,
ALiBi, and none.

    python -m examples.studies.extrapolation --text shakespeare.txt --out runs/ablation

Each is a GPT-2 with other positions, trained as in `examples.studies.ablation`; in the same folder, runs are not
repeated. The phases are train, evaluate and report. Held-out text is cut into windows that do not overlap, with the
trained length and multiples of it, so that all lengths predict the same bytes. Rotary models are trained without
scaling, which is only applied in the evaluation.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from examples.studies.ablation.page import fill, table
from examples.studies.ablation.settings import (
    HELD_OUT,
    UsageError,
    add_options,
    exit_code,
    keep,
    load,
    save,
    settle,
    use_threads,
)
from examples.studies.ablation.training import load_model, load_run, losses_by_position, train_all
from examples.studies.ablation.variants import config_of
from examples.training.text import Text, read_text
from foundry_kernels import RopeScaling
from foundry_kernels.models import ModelConfig

PHASES = ("train", "evaluate", "report")
FACTORS = (1.0, 1.5, 2.0, 4.0, 8.0)

#: The run (a variant of the ablation) and the scaling for each row.
ROWS: dict[str, tuple[str, str | None]] = {
    "learned": ("gpt2", None),
    "sinusoidal": ("sinusoidal", None),
    "none": ("none", None),
    "ALiBi": ("alibi", None),
    "RoPE": ("gpt2+rope", None),
    "RoPE, linear": ("gpt2+rope", "linear"),
    "RoPE, dynamic NTK": ("gpt2+rope", "dynamic"),
    "RoPE, YaRN": ("gpt2+rope", "yarn"),
    "RoPE, Llama 3": ("gpt2+rope", "llama3"),
}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.extrapolation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only", nargs="+", choices=PHASES, metavar="PHASE", help=f"{', '.join(PHASES)} (default: all)"
    )
    parser.add_argument("--factors", nargs="+", type=float, default=list(FACTORS), metavar="F",
                        help="window lengths as multiples of the trained one (default: 1 1.5 2 4 8)")  # fmt: skip
    add_options(parser)
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    phases = options.only or PHASES
    use_threads(options.threads)
    settings = settle(options.out, vars(options))
    trained = settings.seq_len
    lengths = sorted({round(factor * trained) for factor in (1.0, *options.factors)})
    if lengths[0] < trained:
        raise UsageError(f"--factors must be at least 1; got {min(options.factors):g}")
    if set(phases) & {"train", "evaluate"}:
        if options.text is None:
            raise UsageError("--text is needed to train and to evaluate; --only report needs none")
        text = read_text(options.text, trained)
        tokens = predictions(text, lengths)
    if "train" in phases:
        keep(options.out, settings)
        train_all(options.out, options.text, settings, list(dict.fromkeys(n for n, _ in ROWS.values())), options.seeds)
    if "evaluate" in phases:
        configs = {name: config_of(name, settings.shape) for name, _ in ROWS.values()}
        for seed in options.seeds:
            evaluate(options.out, text, configs, trained, lengths, tokens, seed)
    if "report" in phases:
        report(options.out, trained, lengths, options.seeds, options.page)
    return 0


def predictions(text: Text, lengths: Sequence[int]) -> int:
    """The number of bytes that whole windows of any length predict.

    Raises:
        UsageError: the held-out text is too short.
    """
    unit = math.lcm(*lengths)
    count = min(HELD_OUT, len(text.held_out) - 1) // unit * unit
    if count == 0:
        raise UsageError(f"--text must hold out more than {unit} bytes for windows of {', '.join(map(str, lengths))}; "
                         f"got {len(text.held_out)}")  # fmt: skip
    return count


def extended(config: ModelConfig, kind: str | None, length: int) -> ModelConfig | None:
    """The configuration for windows of `length`, or None if there are no positions for them."""
    if config.positions == "learned":
        return config if length <= config.max_seq_len else None
    scaling = None
    if kind is not None and length > config.max_seq_len:
        scaling = RopeScaling.to_length(kind, config.max_seq_len, length)
    return dataclasses.replace(config, max_seq_len=max(length, config.max_seq_len), rope_scaling=scaling)


def evaluate(
    folder: Path, text: Text, configs: dict[str, ModelConfig], trained: int, lengths: list[int], tokens: int, seed: int
) -> None:
    """Computes the losses of one seed's models by row and length. Results in the folder are reused."""
    path = folder / f"extrapolation-seed{seed}.json"
    about = {"text": text.digest, "tokens": tokens}
    kept = load(path) or {}
    if any(kept.get(key) != value for key, value in about.items()):
        kept = about | {"losses": {}}
    for row, (name, kind) in ROWS.items():
        if load_run(folder, name, seed, text) is None:
            raise UsageError(f"{folder} has no run of {name}, seed {seed}: --only train makes it")
        for length in lengths:
            config = extended(configs[name], kind, length)
            if config is None or f"{row} {length}" in kept["losses"]:
                continue
            if config.rope_scaling is None and kind is not None:  # no scaling at the trained length
                found = kept["losses"][f"RoPE {length}"]
            else:
                of = losses_by_position(load_model(folder, name, seed, config), text.held_out, length, tokens)
                edges = [0, *(edge for edge in lengths if edge <= length)]
                found = {
                    "loss": of.mean().item(),
                    "ranges": {f"{a}-{b}": of[a:b].mean().item() for a, b in pairwise(edges)},
                }
            kept["losses"][f"{row} {length}"] = found
            save(path, kept)
            print(f"{row}, seed {seed}, {length} tokens: perplexity {math.exp(found['loss']):.3f}", flush=True)


def collect(folder: Path, trained: int, lengths: Sequence[int], seeds: Sequence[int]) -> dict[str, Any]:
    """Perplexities of the seeds' mean losses by row and length, and for the longest windows by range of positions."""
    found = {seed: load(folder / f"extrapolation-seed{seed}.json") for seed in seeds}
    found = {seed: kept for seed, kept in found.items() if kept is not None}
    if not found:
        raise UsageError(f"{folder} has no extrapolation of seeds {', '.join(map(str, seeds))}: --only evaluate first")
    rows: dict[str, Any] = {}
    for row, (_, kind) in ROWS.items():
        of: dict[int, list[dict[str, Any]]] = {
            length: [k["losses"][f"{row} {length}"] for k in found.values() if f"{row} {length}" in k["losses"]]
            for length in lengths
        }
        ranges = of[max(lengths)][0]["ranges"] if of[max(lengths)] else {}
        rows[row] = {
            "kind": "scaled" if kind else "plain",
            "lengths": {
                str(n): {"losses": [v["loss"] for v in values], "perplexity": _perplexity(v["loss"] for v in values)}
                if values else None
                for n, values in of.items()
            },
            "ranges": {r: _perplexity(v["ranges"][r] for v in of[max(lengths)]) for r in ranges},
        }  # fmt: skip
    tokens = next(iter(found.values()))["tokens"]
    return {"trained": trained, "lengths": list(lengths), "seeds": list(found), "tokens": tokens, "rows": rows}


def _perplexity(losses: Any) -> float:
    return math.exp(min(statistics.fmean(losses), 700.0))


def report(folder: Path, trained: int, lengths: Sequence[int], seeds: Sequence[int], page: Path | None) -> None:
    """Prints the tables, and writes them and the picture to the folder or to `page`."""
    results = collect(folder, trained, lengths, seeds)
    no_rows = f"no rows beyond {trained}"
    rows = [
        [name, *(f"{of['perplexity']:.2f}" if (of := row["lengths"][str(n)]) else no_rows for n in lengths)]
        for name, row in results["rows"].items()
    ]
    whole = table(["positions", *(f"{n} ({n / trained:g}x)" for n in lengths)], rows)
    ranges = list(results["rows"]["RoPE"]["ranges"])
    by_range = table(
        ["positions", *(r.replace("-", " to ") for r in ranges)],
        [[n, *(f"{v:.2f}" for v in row["ranges"].values())] for n, row in results["rows"].items() if row["ranges"]],
    )
    count = len(results["seeds"])
    part = (
        f"Perplexity a byte of the same {results['tokens']:,} held-out bytes in windows of so many tokens that do not "
        f"overlap; trained on windows of {trained}; {count} {'seed' if count == 1 else 'seeds'}.\n\n{whole}\n\n"
        f"In the windows of {max(lengths)}, by the position:\n\n{by_range}"
    )
    print(part)
    target = folder if page is None else page.with_suffix("")
    save(target / "extrapolation.json", results)
    try:
        from examples.studies.ablation import plots
    except ImportError as error:
        print(f"\nno picture: matplotlib does not import ({error}); pip install 'foundry-kernels[train]'")
    else:
        plots.extrapolation(results, target / "extrapolation.png")
    if page is None:
        (folder / "extrapolation.md").write_text(part + "\n", encoding="utf-8")
    else:
        fill(page, {"extrapolation": part})


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse(argv)))


if __name__ == "__main__":
    sys.exit(main())
