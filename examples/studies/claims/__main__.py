"""Compares the numbers that tutorials on transformers claim with measurements. The page is claims.md; its results are
in this folder.

    python -m examples.studies.claims --text tinyshakespeare.txt    # everything
    python -m examples.studies.claims --only train memory           # also on a busy machine
    python -m examples.studies.claims --only timings page           # later, on a quiet machine
    python -m examples.studies.claims --only page                   # only the page, from the stored results

Without --text, it trains on the standard library's source, like `make demo`; nothing is downloaded. A phase continues
where it stopped. Parts of the page without new results keep the old ones.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.studies.ablation.settings import UsageError, check_device, exit_code, use_threads
from examples.studies.claims import longest, page, results, studies, timings

PHASES = ("train", "memory", "timings", "page")
PAGE = Path(__file__).parents[1] / "claims.md"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.claims",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=PHASES, metavar="PHASE", help=f"{', '.join(PHASES)} (default: all)")
    add("--scale", choices=studies.SCALES, default="small", help="small: 20 minutes on 2 cores in all; tutorial: 10 "
        "million parameters and 5,000 steps a run, for a GPU (default: small)")  # fmt: skip
    add("--studies", nargs="+", choices=tuple(studies.STUDIES), metavar="NAME",
        help=f"what to train: {', '.join(studies.STUDIES)} (default: all)")  # fmt: skip
    add("--text", type=Path, metavar="FILE", help="any file, read as bytes; its last tenth is held out")
    add("--out", type=Path, metavar="DIR", help="default: runs/claims-SCALE")
    add("--seeds", nargs="+", type=int, default=[0, 1], metavar="N", help="default: 0 1")
    add("--threads", type=int, metavar="N", help="default: PyTorch's")
    add("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    add("--steps", type=int, metavar="N", help="steps of each training run (default: the scale's)")
    add("--page", type=Path, default=PAGE, metavar="FILE",
        help="default: examples/studies/claims.md; its results are kept in the folder of its name")  # fmt: skip
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> int:
    phases = options.only or PHASES
    use_threads(options.threads)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    folder = options.out or Path("runs") / f"claims-{options.scale}"
    overrides: dict[str, Any] = {"device": device}
    if options.steps is not None:
        if options.steps < 1:
            raise UsageError(f"--steps must be at least 1; got {options.steps}")
        overrides["steps"] = options.steps
    if "train" in phases:
        keys = options.studies or list(studies.STUDIES)
        studies.train(folder, options.text, options.scale, options.seeds, keys, overrides)
    if "memory" in phases:
        longest.measure(folder, options.scale, device)
    if "timings" in phases:
        timings.measure(folder, options.scale, device)
    if "page" in phases:
        found = results.collect(folder, options.scale, options.page)
        page.write(found, options.page)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    return exit_code(lambda: run(parse(None if argv is None else list(argv))))


if __name__ == "__main__":
    sys.exit(main())
