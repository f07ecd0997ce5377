"""GPT-2's choices against LLaMA's, one at a time: the same tokens, seeds, optimizer and, within 3 %, parameters.

    python -m examples.studies.ablation --text shakespeare.txt --out runs/ablation
    python -m examples.studies.ablation --out runs/ablation --only speed tables report    # on a quiet machine, later

The phases are train (losses; existing runs in --out are not repeated), speed (the variants in turns), tables (attention
and norms alone) and report. They write JSON files to --out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

from examples.studies.ablation import report, speed, tables
from examples.studies.ablation.settings import (
    Settings,
    UsageError,
    add_options,
    exit_code,
    keep,
    load,
    settle,
    use_threads,
)
from examples.studies.ablation.training import train_all
from examples.studies.ablation.variants import check_parameters, config_of, names, title
from foundry_kernels.models import ModelConfig

PHASES = ("train", "speed", "tables", "report")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.ablation",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PHASES, metavar="PHASE", help=f"{', '.join(PHASES)} (default: all)")
    add("--variants", nargs="+", metavar="NAME", help="default: GPT-2, each single change toward LLaMA, LLaMA")
    add("--back", action="store_true", help="also LLaMA with each change taken back")
    add("--minutes", type=float, metavar="N", help="choose --steps so that training takes about N minutes")
    add_options(parser)
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    phases = options.only or PHASES
    use_threads(options.threads)
    if "train" in phases and options.text is None:
        raise UsageError("--text is needed to train; --only speed tables report need none")
    if options.minutes is not None and (options.steps is not None or options.minutes <= 0):
        raise UsageError(f"--minutes must be above 0 and excludes --steps; got {options.minutes}")
    settings = settle(options.out, vars(options))
    chosen, configs = choose(options, settings)
    if options.minutes is not None and load(options.out / "settings.json") is None:
        steps = plan_steps(settings, configs, len(options.seeds), options.minutes)
        settings = settle(options.out, {**vars(options), "steps": steps})
    if "train" in phases:
        # Written only now, so that invalid options create no folder.
        keep(options.out, settings)
        print(listing(settings, configs), flush=True)
        train_all(options.out, options.text, settings, chosen, options.seeds)
    if "speed" in phases:
        speed.measure(options.out, settings, configs)
    if "tables" in phases:
        tables.measure(options.out)
    if "report" in phases:
        found = options.variants or names(settings.shape, back=True)
        report.write(options.out, settings, found, options.seeds, options.page)
    return 0


def choose(options: argparse.Namespace, settings: Settings) -> tuple[list[str], dict[str, ModelConfig]]:
    """The requested variants and their models, after checking that they are as large as GPT-2."""
    chosen = list(dict.fromkeys(options.variants or names(settings.shape, options.back)))
    try:
        configs = {name: config_of(name, settings.shape) for name in dict.fromkeys(["gpt2", *chosen])}
        check_parameters(configs)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return chosen, {name: configs[name] for name in chosen}


def plan_steps(settings: Settings, configs: dict[str, ModelConfig], seeds: int, minutes: float) -> int:
    """The number of steps that fit, estimated from a few steps of each variant. A tenth of the time is for
    evaluation."""
    total = 0.0
    for config in configs.values():
        step, times = speed.OneStep(config, settings)(), []
        for _ in range(4):
            start = time.perf_counter()
            step()
            times.append(time.perf_counter() - start)
        total += statistics.median(times[1:])
    steps = int(0.9 * 60.0 * minutes / (seeds * total))
    if steps < 1:
        raise UsageError(f"--minutes {minutes:g} is less than one step of each variant takes")
    print(f"{1e3 * total / len(configs):.0f} ms a step: {steps} steps of each run fit {minutes:g} minutes", flush=True)
    return steps


def listing(settings: Settings, configs: dict[str, ModelConfig]) -> str:
    """The variants with their parameter counts."""
    expected = config_of("gpt2", settings.shape).n_parameters
    width = max(map(len, configs))
    lines = [
        f"{name:<{width}}  {title(name, settings.shape):<32} {config.n_parameters:>10,} parameters "
        f"({config.n_parameters / expected - 1.0:+.1%}), feed-forward width {config.ffn_width}"
        for name, config in configs.items()
    ]
    tokens = settings.steps * settings.batch * settings.seq_len
    steps = f"{settings.steps} steps of {settings.batch} x {settings.seq_len} bytes"
    return "\n".join([f"{steps} ({tokens / 1e6:.2f} M), {settings.dtype}", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse(None if argv is None else list(argv))))


if __name__ == "__main__":
    sys.exit(main())
