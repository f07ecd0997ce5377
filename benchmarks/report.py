"""Keeps results, and makes pages from them: `python -m benchmarks report` and `readme`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks import tables, verdict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

#: What a row of a kind must hold; those with a reason why they have no figures need no more than the first five.
_ROW = ("op", "row", "direction", "dtype", "case")
_FIGURES = {
    "op": ("memory", "median_us"),
    "overhead": ("host_us",),
    "model": ("median_us", "tokens/s", "peak_bytes"),
    "scaling": ("axis", "sizes", "lines"),
}


def keep(source: Path, target: Path) -> None:
    """Keeps what matters of a run: the rows, what they were measured on and when, but not every round."""
    run = _read(source)
    for key in ("benchmarks", "machine_info", "datetime", "environment", "device"):
        if key not in run:
            raise SystemExit(
                f"error: {source} has no {key!r}: it is not a result of pytest benchmarks --benchmark-json"
            )
    rows = [b["extra_info"] for b in run["benchmarks"]]
    # What a run needs most comes first in it; here the rows of a kind and an operation stand together.
    kinds, ops = (list(dict.fromkeys(row.get(key) for row in rows)) for key in ("kind", "op"))
    kept = {
        "date": run["datetime"][:10],
        "device": device(run),
        "environment": run["environment"],
        "full": run.get("full", False),
        "rows": sorted(rows, key=lambda row: (kinds.index(row.get("kind")), ops.index(row.get("op")))),
        "absent": run.get("absent", []),
        **{key: run[key] for key in ("isa", "budget", "sources") if key in run},
        **({"commit": found} if (found := commit(run)) else {}),
    }
    check(kept, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(kept, indent=0) + "\n")


def commit(run: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the commit that was measured, as pytest-benchmark asks git for it; None where it is no checkout."""
    info = run.get("commit_info", {})
    if not re.fullmatch("[0-9a-f]{40}", str(info.get("id"))):
        return None
    return {"id": info["id"], "dirty": bool(info.get("dirty"))}


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


def page(source: Path, draw: bool = True) -> Path:
    """Makes the page of kept results, in the same folder, and draws its pictures or takes those that are there."""
    kept = load(source)
    pictures = _pictures(kept, source) if draw else named_pictures(kept, source)
    parts = [f"# {source.stem}", tables.header(kept, source.name)]
    parts += [text for text in (tables.held(kept), tables.cut(kept)) if text]
    parts += [f"![{title}]({path.name})" for title, path in pictures]
    for title, text in (
        ("In short", tables.summary(kept)),
        (verdict.TITLE, verdict.slower_table(kept)),
        ("Operations", tables.operations(kept)),
        ("Models", tables.models(kept)),
        ("Host time a call", tables.overhead(kept)),
        ("Growth", tables.scaling(kept)),
        ("Threads that are not here", tables.schedules(kept)),
        ("Without figures", tables.absent(kept)),
    ):
        if text:
            parts += [f"## {title}", text]
    target = source.with_suffix(".md")
    target.write_text("\n\n".join(parts) + "\n")
    return target


def report(arguments: list[str]) -> None:
    if not arguments:
        sources = [*all_kept()]
    else:
        run = Path(arguments[0])
        name = arguments[1] if len(arguments) > 1 else _slug(_read(run), run)
        keep(run, RESULTS / f"{name}.json")
        sources = [RESULTS / f"{name}.json"]
    for source in sources:
        print(page(source))


def all_kept(folder: Path = RESULTS) -> dict[Path, dict[str, Any]]:
    """Returns the kept results of a folder, by path, the newest first."""
    found = {path: load(path) for path in sorted(folder.glob("*.json")) if not _of_gpu_check(path)}
    if not found:
        raise SystemExit(f"error: there are no results in {folder}")
    return dict(sorted(found.items(), key=lambda item: item[1]["date"], reverse=True))


def kept_path(name: str) -> Path:
    """Returns the path of results that are named by name or path."""
    path = Path(name)
    return path if path.suffix == ".json" else RESULTS / f"{name}.json"


def _pictures(kept: dict[str, Any], source: Path) -> list[tuple[str, Path]]:
    try:
        from benchmarks import plots
    except ImportError as error:
        print(f"no pictures: matplotlib does not import ({error}); pip install 'foundry-kernels[bench]'")
        return []
    return plots.draw(kept, source)


def named_pictures(kept: dict[str, Any], source: Path) -> list[tuple[str, Path]]:
    """Returns the pictures that exist, without drawing them again."""
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
