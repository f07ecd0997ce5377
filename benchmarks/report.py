"""Stores results, and makes pages from them: `python -m benchmarks report`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from benchmarks import tables, verdict
from benchmarks.kept import dumps, merge, read

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def keep(source: Path, target: Path | None = None) -> Path:
    """Stores a run's rows, machine and date, but not every round, in `target` (default: named after the machine). The
    results of `make gpu-check` are merged into those of the same sources that are there."""
    run: dict[str, Any] = read(source)
    if "parts" in run:
        return _merge(run, target or kept_path(source.stem))
    for key in ("benchmarks", "machine_info", "datetime", "environment", "device"):
        if key not in run:
            raise SystemExit(f"error: {source} has no {key!r}: it is no result of pytest benchmarks --benchmark-json")
    target = target or kept_path(re.sub(r"[^a-z0-9]+", "-", device(run).lower()).strip("-"))
    rows = [b["extra_info"] for b in run["benchmarks"]]
    # A run begins with its most important rows; here the rows of a kind and an operation are together.
    kinds, ops = (list(dict.fromkeys(row.get(key) for row in rows)) for key in ("kind", "op"))
    kept: dict[str, Any] = {
        "date": run["datetime"][:10],
        "device": device(run),
        "environment": run["environment"],
        "full": run.get("full", False),
        **{key: run[key] for key in ("isa", "budget") if key in run},
        **({"commit": found} if (found := commit(run)) else {}),
        "rows": sorted(rows, key=lambda row: (kinds.index(row.get("kind")), ops.index(row.get("op")))),
        "absent": run.get("absent", []),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(dumps(kept), encoding="utf-8")
    return target


def _merge(run: dict[str, Any], target: Path) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    kept: dict[str, Any] = read(target) if target.exists() else {}
    if kept.get("sources") != run["sources"]:
        kept = {"checks": {}}
    kept |= {key: run[key] for key in ("device", "environment", "sources", "isa")} | {"full": False}
    kept["date"] = run["date"][:10]
    for name, part in run["parts"].items():
        kept["checks"][name] = {
            key: part[key] for key in ("ok", "summary", "failed") if part.get(key) not in (None, {})
        }
    merge(kept, run.get("rows", []) + run.get("absent", []))
    target.write_text(dumps(kept), encoding="utf-8")
    return target


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


def page(source: Path, draw: bool = True) -> Path:
    """Makes the page of stored results, in the same folder, and draws its picture or uses the existing one."""
    kept = read(source)
    parts = [f"# {source.stem}", tables.header(kept, source.name)]
    parts += [text for text in (tables.held(kept), tables.cut(kept)) if text]
    if (picture := picture_of(kept, source, draw)) is not None:
        parts.append(f"![How many times faster, forward]({picture.name})")
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


def picture_of(kept: dict[str, Any], source: Path, draw: bool) -> Path | None:
    """Draws the picture, or returns an existing one; None for a run with a restricted instruction set."""
    target = source.with_name(f"{source.stem}-speedups.svg")
    if kept.get("isa", {}).get("forced"):
        return None
    if not draw:
        return target if target.exists() else None
    try:
        from benchmarks import plots
    except ImportError as error:
        print(f"no picture: matplotlib does not import ({error}); pip install 'foundry-kernels[bench]'")
        return None
    return plots.draw(kept, target)


def report(run: Path | None, name: str = "") -> None:
    """Stores a run and makes its page; without a run makes the pages of all stored results again."""
    for source in all_kept() if run is None else [keep(run, kept_path(name) if name else None)]:
        print(page(source))


def all_kept(folder: Path = RESULTS) -> dict[Path, dict[str, Any]]:
    """Returns the stored results of a folder by path, the newest first; the folder also has the report of `make
    gpu-check`."""
    found = {path: read(path) for path in sorted(folder.glob("*.json"))}
    found = {path: kept for path, kept in found.items() if "gpu" not in kept}
    return dict(sorted(found.items(), key=lambda item: item[1]["date"], reverse=True))


def kept_path(name: str) -> Path:
    return RESULTS / f"{name}.json"
