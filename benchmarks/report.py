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
    page = ROOT / "README.md"
    text = page.read_text()
    before, after = text.split(START)[0], text.split(END)[1]
    page.write_text(f"{before}{START}\n{table(_read(source), source)}\n{END}{after}")


def table(kept: dict[str, Any], source: Path) -> str:
    """Markdown: our backends' rows, a time and what it is relative to the peers."""
    ours = [r for r in kept["rows"] if r["row"] in ("triton", "native")]
    peers = list(dict.fromkeys(n for r in ours for n in r["speedup_over"] if n not in ("triton", "native")))
    name = source.resolve().relative_to(ROOT)
    env = kept["environment"]
    lines = [
        f"Measured {kept['date']} on {kept['device']} (torch {env['torch']}), from [{name}]({name}).",
        "Medians of rounds in which all took turns. `x peer`: the peer's time over ours: above 1 we are faster.",
        "`/ copy`: our time over that of a copy of the same bytes into memory that exists. `reused`: the process keeps",
        "freed memory, so that fresh outputs cost no page faults.",
        "",
        f"| operation | direction | dtype | shape | backend | µs | {' | '.join(f'x {p}' for p in peers)} | / copy |",
        "|---" * (7 + len(peers)) + "|",
    ]
    for r in ours:
        shape = r["case"] + (" reused" if r["memory"] == "reused" else "")
        ratios = " | ".join(f"{r['speedup_over'][p]:.2f}" if p in r["speedup_over"] else "–" for p in peers)
        cells = [f"`{r['op']}`", r["direction"], r["dtype"], shape, r["row"], f"{r['median_us']:,.0f}", ratios]
        lines.append(f"| {' | '.join(cells)} | {r['time_over_copy']:.2f} |")
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
