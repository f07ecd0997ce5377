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
    text = "keep a run of --benchmark-json as benchmarks/results/NAME.json, and make NAME.md and its pictures"
    keep = commands.add_parser("report", help=f"{text}; without a run, the pages of all kept results again")
    several = "several on one machine, in their order, are kept together; of kernels that changed, the later rows"
    keep.add_argument("runs", nargs="*", metavar="RUN.json", help=f"{several}; the last argument may be NAME")
    text = "README.md's headline, the page of all results and the page of each"
    table = commands.add_parser("readme", help=f"{text}; the chart is of the newest results, or of NAME's")
    table.add_argument("name", nargs="?", metavar="NAME")
    changes = commands.add_parser("changed", help="by results, the operations whose kernels have changed since")
    changes.add_argument("name", nargs="?", metavar="NAME")
    commands.add_parser("compare", help="this tree against another commit", add_help=False)
    options = parser.parse_args(argv)
    named = report.kept_path(options.name) if getattr(options, "name", None) else None
    if options.command == "report":
        if others := [path for path in options.runs[:-1] if not path.endswith(".json")]:
            keep.error(f"runs are files of --benchmark-json, RUN.json; got {others[0]}")
        report.report(options.runs)
    elif options.command == "changed":
        for source in [named] if named else report.all_kept():
            changed(source)
    else:
        from benchmarks import readme

        readme.write(named)
    return 0


def changed(source: Path) -> None:
    from benchmarks import sources, tables

    kept = report.load(source)
    on_gpu = any("device_us" in row for row in kept["rows"])
    found = sources.changed(kept, sources.digests("cuda" if on_gpu else "cpu"))
    print(f"{source.name}, {tables.of_commit(kept)}: {len(found)} operations have changed since, or are not known")
    print("\n".join(f"  {name}" for name in found), end="\n" if found else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
