"""`python -m benchmarks`: pages and pictures from results, and this tree against another commit."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks import compare, report


def main(argv: list[str]) -> int:
    match argv:
        case ["report", *arguments] if len(arguments) <= 2:
            report.report(arguments)
        case ["readme", *names] if len(names) <= 1:
            from benchmarks import readme

            readme.write(report.kept_path(names[0]) if names else None)
        case ["changed", *names] if len(names) <= 1:
            for source in [report.kept_path(name) for name in names] or report.all_kept():
                changed(source)
        case ["compare", *arguments]:
            return compare.main(arguments)
        case _:
            print(report.__doc__, file=sys.stderr)
            return 2
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
