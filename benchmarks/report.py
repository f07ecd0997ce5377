"""Results that are kept, and the tables that are made from them.

python -m benchmarks.report keep RUN.json benchmarks/results/NAME.json   # what matters of --benchmark-json
python -m benchmarks.report readme benchmarks/results/NAME.json          # rewrites the tables in README.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START, END = "<!-- results -->", "<!-- end of results -->"


def keep(source: Path, target: Path) -> None:
    run = _read(source)
    for key in ("benchmarks", "machine_info", "datetime", "environment"):
        if key not in run:
            raise SystemExit(
                f"error: {source} has no {key!r}: it is not a result of pytest benchmarks --benchmark-json"
            )
    cpu = run["machine_info"].get("cpu", {})
    kept = {
        "date": run["datetime"][:10],
        "device": run["device"]
        if run["device"] != "cpu"
        else f"{cpu.get('brand_raw', 'CPU')}, {cpu.get('count')} cores",
        "environment": run["environment"],
        "rows": [b["extra_info"] for b in run["benchmarks"]],
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(kept, indent=0) + "\n")


def readme(source: Path) -> None:
    """The summary goes into README.md, every row into a page beside the results."""
    page, kept = ROOT / "README.md", _read(source)
    text = page.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    page.write_text(f"{before}{START}\n{summary(kept, source)}\n{END}{after}")
    source.with_suffix(".md").write_text(f"# {source.stem}\n\n{table(kept, source)}\n")


def _header(kept: dict[str, Any], source: Path, folder: Path) -> list[str]:
    name = source.resolve().relative_to(folder)
    return [
        f"Measured {kept['date']} on {kept['device']} (torch {kept['environment']['torch']}), from [{name}]({name}).",
        "Medians of rounds in which all took turns. `x peer`: the peer's time over ours: above 1 we are faster.",
        "`/ copy`: our time over that of a copy of the same bytes into memory that exists. `reused`: the process keeps",
        "freed memory, so that fresh outputs cost no page faults.",
    ]


def _ours(kept: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows of our backends, and all their peers."""
    ours = [r for r in kept["rows"] if r["row"] in ("triton", "native")]
    return ours, list(dict.fromkeys(n for r in ours for n in r["speedup_over"] if n not in ("triton", "native")))


def _shape(row: dict[str, Any]) -> str:
    return str(row["case"]) + (" reused" if row["memory"] == "reused" else "")


def _ratio(row: dict[str, Any], peer: str) -> str:
    return f"{row['speedup_over'][peer]:.2f}" if peer in row["speedup_over"] else "–"


def table(kept: dict[str, Any], source: Path) -> str:
    """Markdown: every row of our backends, with its time, memory and what it is relative to the peers."""
    ours, peers = _ours(kept)
    ratios = " | ".join(f"x {p}" for p in peers)
    lines = [
        *_header(kept, source, source.resolve().parent),
        "",
        f"| operation | direction | dtype | shape | backend | µs | {ratios} | / copy | GB/s | peak MB | saved MB |",
        "|---" * (10 + len(peers)) + "|",
    ]
    for r in ours:
        cells = [f"`{r['op']}`", r["direction"], r["dtype"], _shape(r), r["row"], f"{r['median_us']:,.0f}"]
        cells += [_ratio(r, p) for p in peers]
        cells += [f"{r['time_over_copy']:.2f}", f"{r.get('GB/s', 0):.1f}"]
        cells += [f"{r[key] / 1e6:.1f}" if key in r else "–" for key in ("peak_bytes", "saved_bytes")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(kept: dict[str, Any], source: Path) -> str:
    """Markdown: forward and backward on the shapes of which the op says in their name that they fit the cache or do
    not, dtypes side by side."""
    ours, peers = _ours(kept)
    chosen = [r for r in ours if r["direction"] != "both" and ("cached" in r["case"] or "large" in r["case"])]
    dtypes = list(dict.fromkeys(r["dtype"] for r in chosen))
    groups: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for r in chosen:
        groups.setdefault((r["op"], r["direction"], _shape(r), r["row"]), {})[r["dtype"]] = r
    page = source.with_suffix(".md").resolve().relative_to(ROOT)
    lines = [
        *_header(kept, source, ROOT),
        f"Each cell: {' / '.join(dtypes)}. More shapes, both directions in one, memory: [{page}]({page}).",
        "",
        f"| operation | direction | shape | backend | µs | {' | '.join(f'x {p}' for p in peers)} | / copy |",
        "|---" * (6 + len(peers)) + "|",
    ]
    for (op, direction, shape, backend), by_dtype in groups.items():
        found = [by_dtype[d] for d in dtypes if d in by_dtype]
        cells = [f"`{op}`", direction, shape, backend, " / ".join(f"{r['median_us']:,.0f}" for r in found)]
        cells += [" / ".join(_ratio(r, p) for r in found) for p in peers]
        cells.append(" / ".join(f"{r['time_over_copy']:.2f}" for r in found))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise SystemExit(f"error: {path} cannot be read as results: {error}") from None


def main(argv: list[str]) -> None:
    match argv:
        case ["keep", source, target]:
            keep(Path(source), Path(target))
        case ["readme", source]:
            readme(Path(source))
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
