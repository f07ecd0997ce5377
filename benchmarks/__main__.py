"""Stores results of the benchmarks, makes pages from them, and compares this tree with another commit."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import compare, report


def main(argv: list[str]) -> int:
    if argv[:1] == ["compare"]:  # it parses the remaining arguments
        return compare.main(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "store a run of --benchmark-json, or of `make gpu-check`, as benchmarks/results/NAME.json, and make its page"
    keep = commands.add_parser("report", help=f"{text}; without a run, the pages of all stored results again")
    keep.add_argument("run", nargs="?", metavar="RUN.json", type=Path)
    keep.add_argument("name", nargs="?", metavar="NAME", default="")
    commands.add_parser("compare", help="this tree against another commit", add_help=False)
    options = parser.parse_args(argv)
    report.report(options.run, options.name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
