"""`python -m benchmarks`: pages and pictures from results, and this tree against another commit."""

from __future__ import annotations

import sys

from benchmarks import compare, report


def main(argv: list[str]) -> int:
    match argv:
        case ["report", *arguments] if len(arguments) <= 2:
            report.report(arguments)
        case ["readme", name]:
            report.readme(report.kept_path(name))
        case ["compare", *arguments]:
            return compare.main(arguments)
        case _:
            print(report.__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
