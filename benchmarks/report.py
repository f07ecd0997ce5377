"""Keeps results, and makes pages from them: `python -m benchmarks report` and `readme`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
START, END = "<!-- results -->", "<!-- end of results -->"

#: What a row of a kind must hold; those with a reason why they have no figures need no more than the first five.
_ROW = ("op", "row", "direction", "dtype", "case")
_FIGURES = {
    "op": ("memory", "median_us"),
    "overhead": ("host_us",),
    "model": ("median_us", "tokens/s", "peak_bytes"),
    "scaling": ("axis", "sizes", "lines"),
}


def keep(source: Path, target: Path) -> None:
    """Keep what matters of a run: the rows, what they were measured on and when, but not every round."""
    run = _read(source)
    for key in ("benchmarks", "machine_info", "datetime", "environment", "device"):
        if key not in run:
            raise SystemExit(
                f"error: {source} has no {key!r}: it is not a result of pytest benchmarks --benchmark-json"
            )
    kept = {
        "date": run["datetime"][:10],
        "device": device(run),
        "environment": run["environment"],
        "full": run.get("full", False),
        "rows": [b["extra_info"] for b in run["benchmarks"]],
        "absent": run.get("absent", []),
        **{key: run[key] for key in ("isa", "budget") if key in run},
    }
    check(kept, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(kept, indent=0) + "\n")


def device(run: dict[str, Any]) -> str:
    cpu = run["machine_info"].get("cpu", {})
    on_cpu = f"{cpu.get('brand_raw', 'CPU')}, {cpu.get('count')} cores"
    forced = run.get("isa", {}).get("forced")
    on_cpu += f", held to {forced}" if forced else ""
    return on_cpu if run["device"] == "cpu" else str(run["device"])


def load(path: Path) -> dict[str, Any]:
    """Kept results.

    Raises:
        SystemExit: naming the file, and what it lacks.
    """
    kept = _read(path)
    check(kept, path)
    return kept


def check(kept: Any, path: Path) -> None:
    def refuse(problem: str) -> None:
        raise SystemExit(f"error: {path} is not a file of kept results: {problem}")

    if not isinstance(kept, dict):
        refuse(f"it holds {type(kept).__name__}, not an object")
    for key, kind in (("date", str), ("device", str), ("environment", dict), ("rows", list)):
        if not isinstance(kept.get(key), kind):
            refuse(f"no {key!r}" if key not in kept else f"{key!r} is {type(kept[key]).__name__}")
    if "torch" not in kept["environment"]:
        refuse("no version of torch in 'environment'")
    for place, rows in (("rows", kept["rows"]), ("absent", kept.get("absent", []))):
        for index, row in enumerate(rows):
            if not isinstance(row, dict):
                refuse(f"{place}[{index}] is {type(row).__name__}")
            kind = row.get("kind", "op")
            if kind not in _FIGURES:
                refuse(f"{place}[{index}] is of the unknown kind {kind!r}")
            needed = (*_ROW, "why_not") if place == "absent" else (*_ROW, *_FIGURES[kind])
            if missing := [key for key in needed if key not in row]:
                refuse(f"{place}[{index}] has no {missing[0]!r}")


def page(source: Path) -> Path:
    """Makes the page and the pictures of kept results, in the same folder."""
    kept = load(source)
    pictures = _pictures(kept, source)
    parts = [f"# {source.stem}", tables.header(kept, source.name)]
    parts += [text for text in (tables.held(kept), tables.cut(kept)) if text]
    parts += [f"![{title}]({path.name})" for title, path in pictures]
    for title, text in (
        ("Operations", tables.operations(kept)),
        ("Models", tables.models(kept)),
        ("Host time a call", tables.overhead(kept)),
        ("Growth", tables.scaling(kept)),
        ("Without figures", tables.absent(kept)),
    ):
        if text:
            parts += [f"## {title}", text]
    target = source.with_suffix(".md")
    target.write_text("\n\n".join(parts) + "\n")
    return target


def readme(source: Path, path: Path = ROOT / "README.md") -> None:
    """Replaces the text between the markers of README.md, and makes the page."""
    text = path.read_text()
    if START not in text or END not in text.split(START)[1]:
        raise SystemExit(f"error: {path} has no {START} followed by {END}, between which results go")
    target, kept = page(source), load(source)
    folder = source.resolve().parent.relative_to(path.resolve().parent)
    chart = next(((title, p) for title, p in _named(kept, source) if p.exists()), None)
    found = [
        tables.summary(kept),
        f"![{chart[0]}]({folder}/{chart[1].name})" if chart else "",
        f"Backward passes, other shapes, whole models, memory, host time and growth: [{folder}/{target.name}]"
        f"({folder}/{target.name}).",
    ]
    between = "\n\n".join(part for part in found if part)
    path.write_text(f"{text.split(START)[0]}{START}\n{between}\n{END}{text.split(END)[1]}")


def report(arguments: list[str]) -> None:
    if not arguments:
        sources = [path for path in sorted(RESULTS.glob("*.json")) if not _of_gpu_check(path)]
        if not sources:
            raise SystemExit(f"error: there are no results in {RESULTS}")
    else:
        run = Path(arguments[0])
        name = arguments[1] if len(arguments) > 1 else _slug(_read(run), run)
        keep(run, RESULTS / f"{name}.json")
        sources = [RESULTS / f"{name}.json"]
    for source in sources:
        print(page(source))


def kept_path(name: str) -> Path:
    """Of results by name or path."""
    path = Path(name)
    return path if path.suffix == ".json" else RESULTS / f"{name}.json"


def _pictures(kept: dict[str, Any], source: Path) -> list[tuple[str, Path]]:
    try:
        from benchmarks import plots
    except ImportError as error:
        print(f"no pictures: matplotlib does not import ({error}); pip install 'foundry-kernels[bench]'")
        return []
    return plots.draw(kept, source)


def _named(kept: dict[str, Any], source: Path) -> list[tuple[str, Path]]:
    """The pictures that exist, without drawing them again."""
    try:
        from benchmarks import plots
    except ImportError:
        return []
    return [(title, path) for title, path in plots.names(kept, source) if path.exists()]


def _slug(run: Any, path: Path) -> str:
    if not isinstance(run, dict) or "device" not in run or "machine_info" not in run:
        raise SystemExit(f"error: {path} is not a result of pytest benchmarks --benchmark-json")
    return re.sub(r"[^a-z0-9]+", "-", device(run).lower()).strip("-")


def _of_gpu_check(path: Path) -> bool:
    """`make gpu-check` keeps its own report in the same folder."""
    found = _read(path)
    return isinstance(found, dict) and "gpu" in found


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SystemExit(f"error: {path} cannot be read as results: {error}") from None
