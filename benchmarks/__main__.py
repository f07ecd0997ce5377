"""Keeps results of the benchmarks, makes pages of them, and compares this tree with another commit."""

from __future__ import annotations

import argparse
import sys

from benchmarks import compare, report


def main(argv: list[str]) -> int:
    if argv[:1] == ["compare"]:  # which parses what follows
        return compare.main(argv[1:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    text = "keep a run of --benchmark-json as benchmarks/results/NAME.json, and make NAME.md and its pictures"
    keep = commands.add_parser("report", help=f"{text}; without a run, the pages of all kept results again")
    keep.add_argument("run", nargs="?", metavar="RUN.json")
    keep.add_argument("name", nargs="?", metavar="NAME", help="default: the device's")
    table = commands.add_parser("readme", help="README.md's table and chart, from kept results")
    table.add_argument("name", metavar="NAME")
    commands.add_parser("compare", help="this tree against another commit", add_help=False)
    options = parser.parse_args(argv)
    if options.command == "report":
        report.report([given for given in (options.run, options.name) if given is not None])
    else:
        report.readme(report.kept_path(options.name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
