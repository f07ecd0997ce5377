"""The parts of README.md that are made from the kept results and from nothing else: what is measured, in the table
"What works where", and the results. A kernel that changes later leaves them as they are: they say which commit was
measured, and `python -m benchmarks changed` what has changed since."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import foundry_kernels as fk
from benchmarks import tables, verdict
from benchmarks.report import RESULTS, ROOT, all_kept, named_pictures, page

START, END = "<!-- results -->", "<!-- end of results -->"
_LEGEND, _END_OF_LEGEND = "<!-- measured -->", "<!-- end of measured -->"
_COLUMN = "`native`, CPU"
#: Measured of a kernel that has changed before newer results, or of no commit that is known.
_OLD = " †"

Results = dict[Path, dict[str, Any]]


def write(source: Path | None = None, path: Path = ROOT / "README.md", folder: Path = RESULTS) -> None:
    """Makes the parts again, and the pages but for their pictures. The table and the chart are of `source`, or of the
    newest results."""
    found = all_kept(folder)
    for each in found:
        page(each, draw=False)
    path.write_text(text(path.read_text(encoding="utf-8"), path.resolve().parent, found, source), encoding="utf-8")


def text(before: str, root: Path, found: Results, source: Path | None = None) -> str:
    """README.md with its parts made again."""
    on_cpu = {path: kept for path, kept in found.items() if not any("device_us" in r for r in kept["rows"])}
    marks: set[str] = set()
    after = _support(before, on_cpu, marks)
    after = _between(after, _LEGEND, _END_OF_LEGEND, _legend(marks))
    return _between(after, START, END, _results(root, found, source or newest(on_cpu)))


def newest(found: Results) -> Path:
    """Returns the newest results, of a run that was not restricted to fewer instructions if there is one."""
    return next((path for path, kept in found.items() if not kept.get("isa", {}).get("forced")), next(iter(found)))


def _between(before: str, start: str, end: str, made: str) -> str:
    if start not in before or end not in before.split(start, 1)[1]:
        raise SystemExit(f"error: README.md has no {start} followed by {end}, between which results go")
    head, rest = before.split(start, 1)
    return f"{head}{start}\n{made}\n{end}{rest.split(end, 1)[1]}"


# --- what is measured -------------------------------------------------------------------------------------------------


def _support(before: str, found: Results, marks: set[str]) -> str:
    """The cells of the kernels' column are made from the operations that the first cell of their row names; a row
    without a native kernel for the CPU keeps what it says."""
    lines, column = before.split("\n"), None
    for index, line in enumerate(lines):
        cells = line.split(" | ")
        if not line.startswith("|"):
            column = None
        elif _COLUMN in cells:
            column = cells.index(_COLUMN)
        elif column is not None:
            named = [name for name in re.findall(r"`(\w+)`", cells[0]) if name in fk.OPS]
            if all_of := {name: state for name in named if (state := measured(name, found)) is not None}:
                cells[column] = _in_a_cell(all_of)
                marks.update(all_of.values())
                lines[index] = " | ".join(cells)
    return "\n".join(lines)


def _in_a_cell(states: dict[str, str]) -> str:
    if len(set(states.values())) == 1:
        return next(iter(states.values()))
    return "; ".join(f"`{name}` {state}" for name, state in states.items())


def measured(name: str, found: Results) -> str | None:
    """Returns what the kept results have of the native CPU kernel, None where there is no such kernel: rows of the
    forward and the backward pass (or of both in one, where the forward pass makes the gradients), with dropout
    too where that is inside, all in one file; the newest such file says of which kernel."""
    op = fk.OPS[name]
    impl = op.impl("native")
    if impl is None or "cpu" not in impl.sources:
        return None
    directions = op.bench.DIRECTIONS[:2] if op.bench is not None else ()
    best, lacking = None, ["forward", "backward"]
    for kept in found.values():
        rows = [r for r in tables.of_kind(kept, "op") if (r["op"], r["row"]) == (name, "native") and "wrong" not in r]
        missing = [d for d in directions if not any(r["direction"] == d for r in rows)]
        if "dropout_p" in inspect.signature(op.public).parameters and not any("dropout" in r["case"] for r in rows):
            missing.append("dropout")
        if rows and (best is None or len(missing) < len(lacking)):
            best, lacking = kept, missing
    if best is None:
        return "not measured"
    latest: dict[str, str] = next((kept["sources"] for kept in found.values() if "sources" in kept), {})
    digest = best.get("sources", {}).get(name)
    state = "measured" + (f", but for {' and '.join(lacking)}" if lacking else "")
    return state + (_OLD if digest is None or digest != latest.get(name) else "")


def _legend(marks: set[str]) -> str:
    legend = "Measured: committed results have rows of the forward and the backward pass."
    if any(_OLD in mark for mark in marks):
        legend += " †: of a kernel that had changed by the newest results, or at a commit that was not recorded."
    return tables.paragraph(legend)


# --- results ----------------------------------------------------------------------------------------------------------


def _results(root: Path, found: Results, source: Path) -> str:
    kept, folder = found[source], source.resolve().parent.relative_to(root).as_posix()
    chart = next(iter(named_pictures(kept, source)), None)
    link = f"{folder}/{source.stem}.md"
    parts = [
        tables.summary(kept),
        f"![{chart[0]}]({folder}/{chart[1].name})" if chart else "",
        f"Backward passes, other shapes, whole models, memory, host time and growth: [{link}]({link}).",
        tables.steps(kept),
        "What is slower than a peer, of all results the worst row of each operation:",
        "\n".join(_behind(folder, path, of) for path, of in found.items()),
    ]
    return "\n\n".join(part for part in parts if part)


def _behind(folder: str, path: Path, kept: dict[str, Any]) -> str:
    found, held = verdict.slower(kept)
    anchor = verdict.TITLE.lower().replace(" ", "-")
    line = f"- {kept['device']}, {kept['date']}, {tables.of_commit(kept)}: "
    line += f"{verdict.counted(found, held)[:-1]} ([all]({folder}/{path.stem}.md#{anchor}))"
    return tables.wrapped(line + (f": {verdict.worst(found)}." if found else "."))
