"""What is made from the kept results and from nothing else: README.md's headline with its chart, and on the page of all
results what is measured and what is slower than a peer.

A kernel that changes later leaves them as they are: the page says which commit was measured, and `python -m benchmarks
changed` what has changed since.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import foundry_kernels as fk
from benchmarks import noise, tables, verdict
from benchmarks.report import RESULTS, ROOT, all_kept, named_pictures, page

START, END = "<!-- slower -->", "<!-- end of slower -->"
#: The page of all results, in the repository.
INDEX = RESULTS.relative_to(ROOT) / "README.md"
_HEADLINE, _END_OF_HEADLINE = "<!-- headline -->", "<!-- end of headline -->"
_LEGEND, _END_OF_LEGEND = "<!-- measured -->", "<!-- end of measured -->"
_COLUMN = "`native`, CPU"
#: Measured of a kernel that has changed before newer results, or of no commit that is known.
_OLD = " †"

Results = dict[Path, dict[str, Any]]


def write(source: Path | None = None, root: Path = ROOT) -> None:
    """Makes these parts again, and the pages of results but for their pictures. The chart is of `source`, or of the
    newest results."""
    found = all_kept(root / RESULTS.relative_to(ROOT))
    for each in found:
        page(each, draw=False)
    for path, made in ((root / "README.md", with_headline), (root / INDEX, with_results)):
        path.write_text(made(path.read_text(encoding="utf-8"), root, found, source), encoding="utf-8")


def with_headline(before: str, root: Path, found: Results, source: Path | None = None) -> str:
    """README.md with its headline made again."""
    shown = source or newest(on_cpu(found))
    return _between(before, _HEADLINE, _END_OF_HEADLINE, _headline(root, found[shown], shown))


def with_results(before: str, root: Path, found: Results, source: Path | None = None) -> str:
    """The page of all results with its parts made again."""
    marks: set[str] = set()
    after = _support(before, on_cpu(found), marks)
    after = _between(after, _LEGEND, _END_OF_LEGEND, _legend(marks))
    return _between(after, START, END, _slower(found, source or newest(on_cpu(found))))


def on_cpu(found: Results) -> Results:
    return {path: kept for path, kept in found.items() if not on_gpu(kept)}


def on_gpu(kept: dict[str, Any]) -> bool:
    return any("device_us" in row for row in kept["rows"])


def newest(found: Results) -> Path:
    """Returns the newest results, of a run that was not restricted to fewer instructions if there is one."""
    return next((path for path, kept in found.items() if not kept.get("isa", {}).get("forced")), next(iter(found)))


def _between(before: str, start: str, end: str, made: str) -> str:
    if start not in before or end not in before.split(start, 1)[1]:
        raise SystemExit(f"error: the page has no {start} followed by {end}, between which results go")
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


def _headline(root: Path, kept: dict[str, Any], source: Path) -> str:
    """The training steps in a sentence, and the chart."""
    folder = source.resolve().parent.relative_to(root).as_posix()
    chart = next(iter(named_pictures(kept, source)), None)
    steps = [r for r in tables.of_kind(kept, "model") if r["direction"] == "step"]
    peaks = {(r["op"], r["case"], r["dtype"], r["row"]): r["peak_bytes"] for r in steps}
    found = []
    for row, base, what in _STEPS:
        for r in steps:
            if r["row"] == row and base in r.get("speedup_over", {}):
                memory = r["peak_bytes"] / peaks[r["op"], r["case"], r["dtype"], base]
                speed = f"**{r['speedup_over'][base]:.2f}x** as fast"
                if noise.call(r, base) == "noisy":
                    speed = f"too noisily to call it faster or slower ({r['speedup_over'][base]:.2f}x)"
                speed += f" in **{memory:.2f}x** the memory"
                found.append(f"a training step of {what} {r['dtype']}, runs {speed}")
                break
    where = f"**On a CPU** ({kept['device']}, {kept['date']})"
    text = tables.paragraph(f"{where}: {', '.join(found)}.") if found else ""
    return "\n\n".join(part for part in (text, f"![{chart[0]}]({folder}/{chart[1].name})" if chart else "") if part)


#: Rows of models, what each is compared with, and what that is.
_STEPS = (
    ("patched by ours", "Hugging Face", "a small Hugging Face Llama, patched, in"),
    ("ours", "reference", "our own model, against plain PyTorch in"),
)


def _slower(found: Results, source: Path) -> str:
    """Of the results that are shown, and of the newest on a GPU, the worst of each operation too."""
    gpu = {path: of for path, of in found.items() if on_gpu(of)}
    whole = {source, newest(gpu)} if gpu else {source}
    return "\n".join(_behind(path, of, whole=path in whole) for path, of in found.items())


def _behind(path: Path, kept: dict[str, Any], whole: bool) -> str:
    """How many rows are behind a peer and, where `whole`, the worst of each operation."""
    found, held = verdict.slower(kept)
    anchor = verdict.TITLE.lower().replace(" ", "-")
    line = f"- {kept['device']}, {kept['date']}, {tables.of_commit(kept)}: "
    line += f"{verdict.counted(found, held, verdict.too_noisy(kept))[:-1]} ([all]({path.stem}.md#{anchor}))"
    return tables.wrapped(line + (f": {verdict.worst(found)}." if found and whole else "."))
