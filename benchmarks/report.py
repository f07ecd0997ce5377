"""Stores results, and makes pages from them: `python -m benchmarks report` and `readme`."""

from __future__ import annotations

import re
from collections import Counter
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks import budget, tables, verdict
from benchmarks.kept import Row, check, dumps, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def keep(source: Path, target: Path, *more: Path) -> None:
    """Stores a run's rows, machine and date, but not every round. Rows of `more` runs, which are later ones on the same
    machine, are added or replace earlier ones. If an operation's kernels have changed since, its earlier rows are
    dropped; so are those of models if any kernel has changed."""
    kept = _results(source)
    for path in more:
        kept = _together(kept, _results(path), f"{path} and {source}")
    # A run begins with its most important rows; here the rows of a kind and an operation are together.
    kinds, ops = (list(dict.fromkeys(row.get(key) for row in kept["rows"])) for key in ("kind", "op"))
    kept["rows"].sort(key=lambda row: (kinds.index(row.get("kind")), ops.index(row.get("op"))))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(dumps(kept), encoding="utf-8")


def _results(path: Path) -> dict[str, Any]:
    """Returns the results of a run's file, or stored ones."""
    run: dict[str, Any] = read(path)
    if "rows" in run:
        check(run, path)
        return run
    for key in ("benchmarks", "machine_info", "datetime", "environment", "device"):
        if key not in run:
            raise SystemExit(f"error: {path} has no {key!r}: it is not a result of pytest benchmarks --benchmark-json")
    kept: dict[str, Any] = {
        "date": run["datetime"][:10],
        "device": device(run),
        "environment": run["environment"],
        "full": run.get("full", False),
        **{key: run[key] for key in ("isa", "budget", "sources") if key in run},
        **({"commit": found} if (found := commit(run)) else {}),
        "rows": [b["extra_info"] for b in run["benchmarks"]],
        "absent": run.get("absent", []),
    }
    check(kept, path)
    return kept


def _together(first: dict[str, Any], later: dict[str, Any], paths: str) -> dict[str, Any]:
    for what in ("device", "environment"):
        if first[what] != later[what]:
            raise SystemExit(f"error: {paths} are of different {what}s: {later[what]} and {first[what]}")
    if not (first.get("sources") and later.get("sources")):
        raise SystemExit(f"error: {paths} do not both say which kernels they are of")
    now = later["sources"]
    changed = {op for op, digest in now.items() if first["sources"].get(op) != digest}

    def unchanged(rows: list[Row]) -> list[Row]:
        return [row for row in rows if not changed or (row["op"] in now and row["op"] not in changed)]

    rows = {_key(row): row for row in later["rows"]}
    rows = {_key(row): row for row in unchanged(first["rows"]) if _key(row) not in rows} | rows
    absent = {_key(row): row for row in (*unchanged(first["absent"]), *later["absent"])}
    kept = first | {key: later[key] for key in ("date", "sources")} | {"full": first["full"] or later["full"]}
    kept |= {"rows": list(rows.values()), "absent": [row for key, row in absent.items() if key not in rows]}
    if "budget" in first and "budget" in later:
        kept["budget"] = budget.together(first["budget"], later["budget"])
        there = Counter(_shape(row) for row in (*kept["rows"], *kept["absent"]))
        left_out = {shape: [min(cut, of - there[shape]), of] for shape, (cut, of) in kept["budget"]["cut"].items()}
        kept["budget"]["cut"] = {shape: cut for shape, cut in left_out.items() if cut[0] > 0}
    if "commit" in first and "commit" in later:
        (one, *ids), dirty = (_ids(first) + _ids(later)), first["commit"]["dirty"] or later["commit"]["dirty"]
        more = [name for name in dict.fromkeys(ids) if name != one]
        kept["commit"] = {"id": one, "dirty": dirty, **({"more": more} if more else {})}
    return kept


def _ids(kept: dict[str, Any]) -> list[str]:
    return [kept["commit"]["id"], *kept["commit"].get("more", ())]


def _shape(row: Row) -> str:
    """The shape of a row, as in a budget's list of cuts."""
    if row.get("kind") == "scaling":
        return f"growth of {row['op']} over {row['case'].removeprefix('by ')}"
    if row.get("kind") == "model":
        return f"model-{row['op']}-{row['case']}-{row['direction']}-{row['dtype']}"
    return f"{row['op']} {tables.shape_of(row)}" if row.get("kind") == "op" else ""


_key = itemgetter("kind", "op", "row", "direction", "dtype", "case", "memory")


def commit(run: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the measured commit, from pytest-benchmark; None without a git checkout."""
    info = run.get("commit_info", {})
    if not re.fullmatch("[0-9a-f]{40}", str(info.get("id"))):
        return None
    return {"id": info["id"], "dirty": bool(info.get("dirty"))}


def device(run: dict[str, Any]) -> str:
    if run["device"] != "cpu":
        return str(run["device"])
    cpu, forced = run["machine_info"].get("cpu", {}), run.get("isa", {}).get("forced")
    return f"{cpu.get('brand_raw', 'CPU')}, {cpu.get('count')} cores" + (f", restricted to {forced}" if forced else "")


def load(path: Path) -> dict[str, Any]:
    """Reads stored results.

    Raises:
        SystemExit: the message names the file and the problem.
    """
    kept: dict[str, Any] = read(path)
    check(kept, path)
    return kept


def page(source: Path, draw: bool = True) -> Path:
    """Makes the page of stored results, in the same folder, and draws its pictures or uses existing ones."""
    kept = load(source)
    parts = [f"# {source.stem}", tables.header(kept, source.name)]
    parts += [text for text in (tables.held(kept), tables.cut(kept)) if text]
    parts += [f"![{title}]({path.name})" for title, path in pictures(kept, source, draw)]
    for title, text in (
        ("In short", tables.summary(kept)),
        (verdict.TITLE, verdict.slower_table(kept)),
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


def pictures(kept: dict[str, Any], source: Path, draw: bool = False) -> list[tuple[str, Path]]:
    """Draws the pictures, or returns existing ones; none for a run with a restricted instruction set."""
    if kept.get("isa", {}).get("forced"):
        return []
    try:
        from benchmarks import plots
    except ImportError as error:
        print(f"no pictures: matplotlib does not import ({error}); pip install 'foundry-kernels[bench]'")
        return []
    if draw:
        return plots.draw(kept, source)
    return [(title, path) for title, path in plots.names(kept, source) if path.exists()]


def report(arguments: list[str]) -> None:
    sources = [*all_kept()] if not arguments else []
    if arguments:
        *runs, name = arguments if len(arguments) > 1 and not arguments[-1].endswith(".json") else [*arguments, ""]
        first, *more = map(Path, runs)
        name = name or re.sub(r"[^a-z0-9]+", "-", _results(first)["device"].lower()).strip("-")
        sources = [RESULTS / f"{name}.json"]
        keep(first, sources[0], *more)
    for source in sources:
        print(page(source))


def all_kept(folder: Path = RESULTS) -> dict[Path, dict[str, Any]]:
    """Returns the stored results of a folder by path, the newest first; the folder also has the report of `make
    gpu-check`."""
    found = {path: load(path) for path in sorted(folder.glob("*.json")) if "gpu" not in read(path)}
    if not found:
        raise SystemExit(f"error: there are no results in {folder}")
    return dict(sorted(found.items(), key=lambda item: item[1]["date"], reverse=True))


def kept_path(name: str) -> Path:
    """Returns the path of results from a name or path."""
    path = Path(name)
    return path if path.suffix == ".json" else RESULTS / f"{name}.json"
