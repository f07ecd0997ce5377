"""Makes README.md's headline with its chart, and the list of slower rows on the page of all results, from stored
results only.

Later changes of kernels do not change them: the page names the measured commit, and `python -m benchmarks changed`
lists the changes since.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks import noise, tables, verdict
from benchmarks.report import RESULTS, ROOT, all_kept, page, pictures

#: The page of all results.
INDEX = RESULTS.relative_to(ROOT) / "README.md"

Results = dict[Path, dict[str, Any]]


def write(source: Path | None = None, root: Path = ROOT) -> None:
    """Updates these parts, and the pages of results without their pictures. The chart shows `source` (default: the
    newest results)."""
    found = all_kept(root / RESULTS.relative_to(ROOT))
    for each in found:
        page(each, draw=False)
    shown = source or newest({path: kept for path, kept in found.items() if not on_gpu(kept)})
    insert(root / "README.md", "headline", _headline(root, found[shown], shown))
    insert(root / INDEX, "slower", _slower(found, shown))


def on_gpu(kept: dict[str, Any]) -> bool:
    return any("device_us" in row for row in kept["rows"])


def newest(found: Results) -> Path:
    """Returns the newest results, preferably of a run without a restricted instruction set."""
    return next((path for path, kept in found.items() if not kept.get("isa", {}).get("forced")), next(iter(found)))


def insert(path: Path, part: str, made: str) -> None:
    """Writes `made` between the two marks of a part of a page."""
    start, end = f"<!-- {part} -->", f"<!-- end of {part} -->"
    head, found, rest = path.read_text(encoding="utf-8").partition(start)
    if end not in rest or not found:
        raise SystemExit(f"error: {path} has no {start} followed by {end}, between which results go")
    path.write_text(f"{head}{start}\n{made}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def _headline(root: Path, kept: dict[str, Any], source: Path) -> str:
    """A sentence about training steps, and the chart."""
    folder = source.resolve().parent.relative_to(root).as_posix()
    chart = next(iter(pictures(kept, source)), None)
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


#: Rows of models, their baselines, and the text about them.
_STEPS = (
    ("patched by ours", "Hugging Face", "a small Hugging Face Llama, patched, in"),
    ("ours", "reference", "our own model, against plain PyTorch in"),
)


def _slower(found: Results, source: Path) -> str:
    """The rows that are slower than a peer. For the shown results and the newest ones on a GPU, includes the worst row
    of each operation."""
    gpu = {path: of for path, of in found.items() if on_gpu(of)}
    whole = {source, newest(gpu)} if gpu else {source}
    return "\n".join(_behind(path, of, whole=path in whole) for path, of in found.items())


def _behind(path: Path, kept: dict[str, Any], whole: bool) -> str:
    """The number of rows slower than a peer and, with `whole`, the worst of each operation."""
    found, held = verdict.slower(kept)
    anchor = verdict.TITLE.lower().replace(" ", "-")
    line = f"- {kept['device']}, {kept['date']}, {tables.of_commit(kept)}: "
    line += f"{verdict.counted(found, held, verdict.too_noisy(kept))[:-1]} ([all]({path.stem}.md#{anchor}))"
    return tables.paragraph(line + (f": {verdict.worst(found)}." if found and whole else "."), "  ")
