"""Keeps results, and makes pages from them: `python -m benchmarks report` and `readme`."""

from __future__ import annotations

import json
import re
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import budget, tables, verdict
from benchmarks import kept as kept_format

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


def keep(source: Path, target: Path, *more: Path) -> None:
    """Keeps what matters of a run: the rows, what they were measured on and when, but not every round. Rows of `more`
    runs, later ones on the same machine, are added or take the places of those that were there; of operations whose
    kernels have changed meanwhile, and of models where any have, no earlier row stays."""
    run = _run(source)
    for path in more:
        _add(run, _run(path), f"{path} and {source}")
    rows = [b["extra_info"] for b in run["benchmarks"]]
    # What a run needs most comes first in it; here the rows of a kind and an operation stand together.
    kinds, ops = (list(dict.fromkeys(row.get(key) for row in rows)) for key in ("kind", "op"))
    kept: dict[str, Any] = {
        "date": run["datetime"][:10],
        "device": device(run),
        "environment": run["environment"],
        "full": run.get("full", False),
        "rows": sorted(rows, key=lambda row: (kinds.index(row.get("kind")), ops.index(row.get("op")))),
        "absent": run.get("absent", []),
        **{key: run[key] for key in ("isa", "budget", "sources") if key in run},
        **({"commit": found} if (found := _commits(run)) else {}),
    }
    check(kept, source)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(kept_format.dumps(kept))


def _run(path: Path) -> dict[str, Any]:
    """A run's file, or kept results as if they were one."""
    run: dict[str, Any] = _read(path)
    if "rows" in run:
        check(run, path)
        first = run.get("commit", {})
        return run | {
            "benchmarks": [{"extra_info": row} for row in run["rows"]],
            "datetime": run["date"],
            "commit_info": first,
            "more_commits": [first | {"id": id} for id in first.get("more", [])],
        }
    for key in ("benchmarks", "machine_info", "datetime", "environment", "device"):
        if key not in run:
            raise SystemExit(f"error: {path} has no {key!r}: it is not a result of pytest benchmarks --benchmark-json")
    return run


def _add(run: dict[str, Any], other: dict[str, Any], paths: str) -> None:
    """Adds what another run has measured to `run`."""
    for what, of in (("devices", device), ("environments", itemgetter("environment"))):
        if of(run) != of(other):
            raise SystemExit(f"error: {paths} are of different {what}: {of(other)} and {of(run)}")
    if not (run.get("sources") and other.get("sources")):
        raise SystemExit(f"error: {paths} do not both say which kernels they are of")
    before, run["sources"] = run["sources"], other["sources"]
    changed = {op for op, digest in run["sources"].items() if before.get(op) != digest}

    def stays(row: dict[str, Any]) -> bool:
        return not changed or (row["op"] in run["sources"] and row["op"] not in changed)

    run["benchmarks"] = [b for b in run["benchmarks"] if stays(b["extra_info"])]
    run["absent"] = [row for row in run.get("absent", []) if stays(row)]
    run["more_commits"] = [*run.get("more_commits", []), commit(other)]
    known = {_key(b["extra_info"]) for b in other["benchmarks"]}
    run["benchmarks"] = [b for b in run["benchmarks"] if _key(b["extra_info"]) not in known] + other["benchmarks"]
    known |= {_key(b["extra_info"]) for b in run["benchmarks"]}
    absent = {_key(row): row for row in (*run["absent"], *other.get("absent", []))}
    run["absent"] = [row for key, row in absent.items() if key not in known]
    run["full"] = run.get("full", False) or other.get("full", False)
    run["datetime"] = other["datetime"]
    if "budget" in run and "budget" in other:
        run["budget"] = budget.together(run["budget"], other["budget"])
        there = Counter(_shape(row) for row in (*(b["extra_info"] for b in run["benchmarks"]), *run["absent"]))
        left_out = {shape: [min(cut, of - there[shape]), of] for shape, (cut, of) in run["budget"]["cut"].items()}
        run["budget"]["cut"] = {shape: rows for shape, rows in left_out.items() if rows[0] > 0}


def _shape(row: dict[str, Any]) -> str:
    """The shape of a row as a budget names what it cuts."""
    if row.get("kind") == "scaling":
        return f"growth of {row['op']} over {row['case'].removeprefix('by ')}"
    if row.get("kind") == "model":
        return f"model-{row['op']}-{row['case']}-{row['direction']}-{row['dtype']}"
    return f"{row['op']} {tables.shape_of(row)}" if row.get("kind") == "op" else ""


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(key) for key in ("kind", *_ROW, "memory"))


def commit(run: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the commit that was measured, as pytest-benchmark asks git for it; None where it is no checkout."""
    info = run.get("commit_info", {})
    if not re.fullmatch("[0-9a-f]{40}", str(info.get("id"))):
        return None
    return {"id": info["id"], "dirty": bool(info.get("dirty"))}


def _commits(run: dict[str, Any]) -> dict[str, Any] | None:
    """Returns `commit`, with the others whose runs were added to it."""
    first = commit(run)
    more = [other for other in run.get("more_commits", []) if other and first and other["id"] != first["id"]]
    if first is None or not more:
        return first
    return first | {
        "dirty": any(c["dirty"] for c in (first, *more)),
        "more": list(dict.fromkeys(c["id"] for c in more)),
    }


def device(run: dict[str, Any]) -> str:
    if "rows" in run:
        return str(run["device"])
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
    restricted = kept.get("isa", {}).get("forced")
    pictures = [] if restricted else _pictures(kept, source) if draw else named_pictures(kept, source)
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
        *runs, name = arguments if len(arguments) > 1 and not arguments[-1].endswith(".json") else [*arguments, ""]
        first, *more = map(Path, runs)
        name = name or _slug(_read(first), first)
        keep(first, RESULTS / f"{name}.json", *more)
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
        return kept_format.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise SystemExit(f"error: {path} cannot be read as results: {error}") from None
